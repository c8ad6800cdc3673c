//! A page about a lab run: for each paper its conclusion, its figures redrawn with the paper's
//! numbers as separate series, its tables, and the differences.

use std::fmt::Write as _;

use anyhow::Result;

use crate::table::{Grid, format_number, layout};
use crate::{LabDocument, Paper, Plot, Row};
use manylane_bench::report::{escape, figure, head, plots};

/// The page.
///
/// # Errors
/// When a plot cannot be drawn.
pub fn html(run: &LabDocument) -> Result<String> {
    let mut page = String::with_capacity(256 << 10);
    let names: Vec<&str> = run.settings.papers.iter().map(|paper| paper.name()).collect();
    let title = format!(
        "manylane lab {}",
        if names.len() == Paper::ALL.len() { "all".into() } else { names.join(", ") }
    );
    page += &head(&title);
    let machine = &run.machine;
    let lead = format!(
        "{} processors ({}), Linux {}. {}",
        machine.cpus,
        machine.model,
        machine.kernel,
        run.settings.scale.describe()
    );
    write!(page, "<h1>{}</h1>\n<p class=lead>{}</p>\n", escape(&title), escape(&lead))?;
    for &paper in &run.settings.papers {
        section(&mut page, run, paper)?;
    }
    page.push_str("<section><h2>How it was measured</h2>\n<dl>\n");
    let memory = format!(
        "{} × {}, {} GiB{}",
        machine.cpus,
        machine.model,
        machine.memory_bytes >> 30,
        if machine.virtual_machine { ", a virtual machine" } else { "" }
    );
    let scale = run.settings.scale.describe();
    let mitigations = machine.mitigations.join("; ");
    for (name, value) in [
        ("Command", &run.settings.command),
        ("Machine", &memory),
        ("Kernel", &machine.kernel),
        ("Mitigations", &mitigations),
        ("Scale", &scale),
    ] {
        writeln!(page, "<dt>{name}<dd>{}", escape(if value.is_empty() { "–" } else { value }))?;
    }
    page.push_str("</dl>\n<p>The raw samples are in the JSON file beside this page.</p></section>\n</main></body></html>\n");
    Ok(page)
}

fn section(page: &mut String, run: &LabDocument, paper: Paper) -> Result<()> {
    writeln!(page, "<section><h2>{paper}</h2>\n<p class=lead>{}</p>", escape(paper.title()))?;
    page.push_str("<h3>What this run says</h3>\n<ul class=says>\n");
    for sentence in paper.conclude(&run.rows) {
        writeln!(page, "<li>{}</li>", escape(&sentence))?;
    }
    page.push_str("</ul>\n");
    for table in paper.tables(&run.settings.scale) {
        let rows: Vec<&Row> =
            run.rows.iter().filter(|row| row.paper == paper && row.table == table.name).collect();
        if rows.is_empty() {
            continue;
        }
        let grid = layout(&rows);
        let measured = rows.iter().any(|row| row.value.is_some());
        if let Some(plot) = table.plot.filter(|_| measured) {
            let unit = &rows.iter().find(|row| !row.unit.is_empty()).map_or("", |row| &row.unit);
            draw(page, &table.title, plot, unit, &grid)?;
        } else {
            writeln!(page, "<h3>{}</h3>", escape(&table.title))?;
        }
        print(page, &grid)?;
    }
    writeln!(page, "<h3>What differs from the paper</h3>\n<ul>")?;
    for sentence in paper.differences(&run.settings.scale) {
        writeln!(page, "<li>{}</li>", escape(&sentence))?;
    }
    page.push_str("</ul></section>\n");
    Ok(())
}

/// A series for each line with a value, and one for each line of the paper.
fn draw(page: &mut String, title: &str, plot: Plot, unit: &str, grid: &Grid<'_>) -> Result<()> {
    if let [_] = &*grid.columns {
        return draw_horizontal(page, title, unit, grid);
    }
    let mut series = Vec::new();
    let mut legend = String::from("<ul class=legend>");
    // A line of the paper has the colour of our line of the same name.
    let mut add = |name: &str, colour: usize, values: Vec<Option<f64>>, samples: Vec<Vec<f64>>, printed| {
        let swatch = match printed {
            true => format!("class=printed style=\"border-color:var(--s{})\"", colour % plots::COLOURS),
            false => format!("style=\"background:var(--s{})\"", colour % plots::COLOURS),
        };
        let _ = write!(legend, "<li><i {swatch}></i>{}</li>", escape(name));
        series.push(plots::Series { colour, values, samples, printed });
    };
    for (colour, (line, cells)) in grid.lines.iter().enumerate() {
        if cells.iter().flatten().any(|row| row.value.is_some()) {
            let values = cells.iter().map(|cell| cell.and_then(|row| row.value)).collect();
            let samples =
                cells.iter().map(|cell| cell.map_or_else(Vec::new, |row| row.samples.clone())).collect();
            add(line, colour, values, samples, false);
        }
    }
    for (colour, (line, cells)) in grid.lines.iter().enumerate() {
        if cells.iter().flatten().any(|row| row.printed.is_some()) {
            let values = cells.iter().map(|cell| cell.and_then(|row| row.printed)).collect();
            add(&format!("paper: {line}"), colour, values, vec![Vec::new(); cells.len()], true);
        }
    }
    legend += "</ul>";
    let svg = match plot {
        Plot::Lines(x) => plots::lines(&grid.columns, x, unit, &series)?,
        Plot::Bars(x) => plots::bars(&grid.columns, x, unit, &series, &[])?,
    };
    let (caption, theirs) = match plot {
        Plot::Lines(_) => {
            ("Lines join medians; each faint dot is one sample.", " Dashed: as the paper printed it.")
        }
        Plot::Bars(_) => ("Medians.", " Hollow: as the paper printed it."),
    };
    let theirs = if series.iter().any(|line| line.printed) { theirs } else { "" };
    figure(page, title, &format!("{caption}{theirs}"), &legend, &svg);
    Ok(())
}

/// With one column only: a row of bars for each line.
fn draw_horizontal(page: &mut String, title: &str, unit: &str, grid: &Grid<'_>) -> Result<()> {
    let names: Vec<String> = grid.lines.iter().map(|(line, _)| (*line).to_string()).collect();
    let of = |value: fn(&Row) -> Option<f64>| -> Vec<Option<f64>> {
        grid.lines.iter().map(|(_, cells)| cells.first().copied().flatten().and_then(value)).collect()
    };
    let series = [(of(|row| row.value), false), (of(|row| row.printed), true)];
    let series: Vec<plots::Series> = series
        .into_iter()
        .filter(|(values, _)| values.iter().any(Option::is_some))
        .map(|(values, printed)| plots::Series { colour: 0, values, samples: Vec::new(), printed })
        .collect();
    let is_printed = series.iter().any(|line| line.printed);
    let legend = if is_printed {
        "<ul class=legend><li><i style=\"background:var(--s0)\"></i>here</li><li><i class=printed style=\"border-color:var(--s0)\"></i>paper</li></ul>"
    } else {
        ""
    };
    figure(page, title, "Medians.", legend, &plots::horizontal_bars(&names, unit, &series)?);
    Ok(())
}

fn print(page: &mut String, grid: &Grid<'_>) -> Result<()> {
    page.push_str("<div class=wide><table><thead><tr><th>");
    for column in &grid.columns {
        write!(page, "<th>{}", escape(column))?;
    }
    page.push_str("</tr></thead><tbody>\n");
    for (line, cells) in &grid.lines {
        let ours = if line.starts_with("lane/") { " class=ours" } else { "" };
        write!(page, "<tr{ours}><td>{}", escape(line))?;
        for cell in cells {
            match cell {
                None => page.push_str("<td>"),
                Some(Row { value: Some(value), .. }) => write!(page, "<td>{}", format_number(*value))?,
                Some(row) => {
                    let why = escape(row.why_not.as_deref().unwrap_or_default());
                    write!(page, "<td title=\"{why}\">–")?;
                }
            }
        }
        page.push_str("</tr>\n");
        if cells.iter().flatten().any(|cell| cell.printed.is_some()) {
            page.push_str("<tr class=quality><td>paper");
            for cell in cells {
                let printed = cell.and_then(|row| row.printed).map_or_else(String::new, format_number);
                write!(page, "<td>{printed}")?;
            }
            page.push_str("</tr>\n");
        }
    }
    page.push_str("</tbody></table></div>\n");
    let mut reasons: Vec<&str> = grid
        .lines
        .iter()
        .flat_map(|(_, cells)| cells.iter().flatten())
        .filter_map(|row| row.why_not.as_deref())
        .collect();
    reasons.sort_unstable();
    reasons.dedup();
    for why in reasons {
        writeln!(page, "<p class=quality>–: {}</p>", escape(why))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LabSettings, Scale};
    use manylane_measure::Document;

    #[test]
    fn the_page_is_whole_has_the_papers_series_and_loads_nothing() {
        let settings = LabSettings::new("manylane lab '<&>'".into(), &Paper::ALL, None, Scale::quick());
        let page = |columns: &[&str]| {
            let mut rows = Vec::new();
            for (paper, table, column) in Paper::ALL.into_iter().flat_map(|paper| {
                let tables = paper.tables(&settings.scale).into_iter();
                tables.flat_map(move |table| columns.iter().map(move |column| (paper, table.name, *column)))
            }) {
                let mut row = Row::new(table, "one", column, "s", vec![1.0, 2.0]);
                row.printed = Some(3.0);
                rows.push(Row { paper, ..row });
                rows.push(Row { paper, ..Row::unavailable(table, "two", column, "s", "no <device>") });
            }
            html(&Document::new(crate::SCHEMA, settings.clone(), rows)).unwrap()
        };
        // A single column is drawn line by line.
        let narrow = page(&["1"]);
        let page = page(&["1", "2"]);
        assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
        let plotted = Paper::ALL.into_iter().flat_map(|paper| paper.tables(&settings.scale));
        let plotted = plotted.filter(|table| table.plot.is_some()).count();
        assert_eq!((page.matches("<svg").count(), page.matches("paper: one").count()), (plotted, plotted));
        assert_eq!((narrow.matches("<svg").count(), narrow.matches("</i>paper").count()), (plotted, plotted));
        assert!(!narrow.contains("paper: one"));
        let bare = page.replace("http://www.w3.org/2000/svg", "");
        for loaded in ["http://", "https://", "<script", "<link", "src=", "@import", "url("] {
            assert!(!bare.contains(loaded), "{loaded}");
        }
        assert_eq!(page.matches("A quick run, which shows the way").count(), 2, "at the top and below");
        assert!(!page.contains("no <device>"), "neither in the text nor in a title");
        assert!(page.contains("no &lt;device&gt;") && page.contains("&lt;&amp;&gt;"));
    }
}
