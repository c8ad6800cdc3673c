//! The report of a run: a page with plots, all figures and the settings, in one file that loads
//! nothing else, and the same table for a terminal.

mod figure;
mod plots;

use std::fmt::Write as _;

use anyhow::Result;
use manylane_measure::{Document, Machine};

pub use self::figure::{Figure, Grid, Labels, Shape, escape};
pub use self::plots::Series;
use crate::settings::BenchSettings;
use crate::stats::distinct;

/// Tables and figures of the rows of one benchmark.
pub trait Figures: Sized {
    /// Heads of the columns of the table.
    const COLUMNS: &'static [&'static str];

    /// The cells of the line of this row; `all` are the rows of the run, for comparisons.
    fn cells(&self, all: &[Self]) -> Vec<String>;

    /// Title of the section of the page that the row belongs to.
    fn section(&self) -> String;

    /// The figures of a section.
    fn figures(rows: &[&Self]) -> Vec<Figure>;
}

/// The page.
pub fn html<R: Figures>(document: &Document<BenchSettings, R>) -> Result<String> {
    let name = document.schema.trim_start_matches("manylane.").trim_end_matches(".v1").replace('.', " ");
    let mut page = head(&format!("manylane {name}"), &subtitle(document));
    for title in distinct(document.rows.iter().map(R::section)) {
        let rows: Vec<&R> = document.rows.iter().filter(|row| row.section() == title).collect();
        writeln!(page, "<section><h2>{}</h2>", escape(&title))?;
        for figure in R::figures(&rows) {
            figure.write(&mut page)?;
        }
        page.push_str("<h3>All figures</h3>");
        table(&mut page, R::COLUMNS, rows.iter().map(|row| row.cells(&document.rows)));
        page.push_str("</section>\n");
    }
    about(&mut page, &document.machine, &document.settings.entries());
    Ok(page)
}

/// The beginning of a page.
#[must_use]
pub fn head(title: &str, lead: &str) -> String {
    let title = escape(title);
    let mut page = String::with_capacity(256 << 10);
    let _ = write!(page, include_str!("head.html"), title = title);
    let _ = write!(page, "<h1>{title}</h1>\n<p class=lead>{}</p>\n", escape(lead));
    page
}

fn subtitle<R>(document: &Document<BenchSettings, R>) -> String {
    let (machine, settings) = (&document.machine, &document.settings);
    format!(
        "{} CPUs ({}), Linux {}. Traffic over {} from {}, {} flows, {} rounds of {} s, in which receivers take turns.",
        machine.cpus,
        machine.model,
        machine.kernel,
        settings.device,
        settings.sender,
        settings.flows,
        settings.rounds,
        settings.sample_seconds
    )
}

/// A table. Lines that name a lane are highlighted.
pub fn table<S: AsRef<str>>(page: &mut String, header: &[S], lines: impl Iterator<Item = Vec<String>>) {
    page.push_str("<div class=wide><table><thead><tr>");
    header.iter().for_each(|name| _ = write!(page, "<th>{}", escape(name.as_ref())));
    page.push_str("</tr></thead><tbody>\n");
    for line in lines {
        let is_lane = line.iter().any(|cell| cell.starts_with("lane/"));
        page.push_str(if is_lane { "<tr class=ours>" } else { "<tr>" });
        line.iter().for_each(|cell| _ = write!(page, "<td>{}", escape(cell)));
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table></div>\n");
}

/// The end of a page: the machine, and how the run was made.
pub fn about(page: &mut String, machine: &Machine, settings: &[(&str, String)]) {
    let size = format!(
        "{} × {}, {} GiB{}",
        machine.cpus,
        machine.model,
        machine.memory_bytes >> 30,
        if machine.virtual_machine { ", a virtual machine" } else { "" }
    );
    let machine = [
        ("Machine", size),
        ("Kernel", machine.kernel.clone()),
        ("Idle CPUs", machine.idle.clone()),
        ("Mitigations", machine.mitigations.join("; ")),
    ];
    page.push_str("<section><h2>Set-up</h2>\n<dl>\n");
    for (name, value) in settings.iter().chain(&machine) {
        let _ = writeln!(page, "<dt>{name}<dd>{}", escape(if value.is_empty() { "–" } else { value }));
    }
    page.push_str("</dl>\n<p>The JSON file beside this page has the raw samples.</p></section>\n");
    page.push_str("</main></body></html>\n");
}

#[cfg(test)]
mod tests;
