//! A page about a lab run: for each paper its figures redrawn with the paper's numbers as separate
//! series, its tables, and the differences.

use std::fmt::Write as _;

use anyhow::Result;
use manylane_bench::report::{self, Figure, Labels, Series, Shape, escape};

use crate::paper_table::Plot;
use crate::table::{Grid, layout, print};
use crate::{LabDocument, Paper, Row};

/// The page.
pub fn html(run: &LabDocument) -> Result<String> {
    let (machine, settings) = (&run.machine, &run.settings);
    let names: Vec<&str> = settings.papers.iter().map(|paper| paper.name()).collect();
    let names = if names.len() == Paper::ALL.len() { "all".into() } else { names.join(", ") };
    let scale = settings.scale.describe();
    let lead = format!("{} CPUs ({}), Linux {}. {scale}", machine.cpus, machine.model, machine.kernel);
    let mut page = report::head(&format!("manylane lab {names}"), &lead);
    for &paper in &settings.papers {
        section(&mut page, run, paper)?;
    }
    report::about(&mut page, machine, &[("Command", settings.command.clone()), ("Scale", scale)]);
    Ok(page)
}

fn section(page: &mut String, run: &LabDocument, paper: Paper) -> Result<()> {
    writeln!(page, "<section><h2>{paper}</h2>\n<p class=lead>{}</p>", escape(paper.title()))?;
    for table in paper.tables(&run.settings.scale) {
        let rows: Vec<&Row> = table.rows(paper, &run.rows);
        if rows.is_empty() {
            continue;
        }
        match table.plot.filter(|_| rows.iter().any(|row| row.value.is_some())) {
            Some(plot) => figure(&table.title, plot, &rows).write(page)?,
            None => writeln!(page, "<h3>{}</h3>", escape(&table.title))?,
        }
        let printed = print(&rows, table.baseline);
        report::table(page, &printed.header, printed.lines.into_iter());
        for (index, note) in printed.notes.iter().enumerate() {
            writeln!(page, "<p class=quality>[{}] {}</p>", index + 1, escape(note))?;
        }
    }
    writeln!(page, "<h3>Differences from the paper</h3>\n<ul>")?;
    for sentence in paper.differences(&run.settings.scale) {
        writeln!(page, "<li>{}</li>", escape(&sentence))?;
    }
    page.push_str("</ul></section>\n");
    Ok(())
}

/// A series for each line with a value, and one for each line of the paper in the same colour.
/// With one column only: a row of bars for each line.
fn figure(title: &str, plot: Plot, rows: &[&Row]) -> Figure {
    let Grid { columns, lines } = layout(rows);
    let y = rows.iter().map(|row| &*row.unit).find(|unit| !unit.is_empty()).unwrap_or_default();
    let (x, shape) = match plot {
        Plot::Lines(x) => (x, Shape::Lines),
        Plot::Bars(x) => (x, Shape::Bars),
    };
    let labels = Labels { title, caption: "", x, y };
    let mut series = Vec::new();
    let mut add = |name: String, colour: usize, printed: bool, cells: &[Option<&Row>]| {
        let value = |row: &Row| if printed { row.printed } else { row.value };
        let samples = |row: &&Row| if printed { Vec::new() } else { row.samples.clone() };
        let values: Vec<Option<f64>> = cells.iter().map(|cell| cell.and_then(value)).collect();
        let samples = cells.iter().map(|cell| cell.as_ref().map(samples).unwrap_or_default()).collect();
        if values.iter().any(Option::is_some) {
            series.push(Series { name, colour, values, samples, printed });
        }
    };
    if let [_] = &*columns {
        let cells: Vec<Option<&Row>> = lines.iter().map(|(_, cells)| cells[0]).collect();
        add("here".into(), 0, false, &cells);
        add("paper".into(), 0, true, &cells);
        return Figure::new(labels, Shape::Rows, lines.into_iter().map(|(line, _)| line).collect(), series);
    }
    for (colour, (line, cells)) in lines.iter().enumerate() {
        add(line.clone(), colour, false, cells);
    }
    for (colour, (line, cells)) in lines.iter().enumerate() {
        add(format!("paper: {line}"), colour, true, cells);
    }
    Figure::new(labels, shape, columns, series)
}

#[cfg(test)]
mod tests {
    use manylane_measure::Document;

    use super::*;
    use crate::{LabSettings, Scale};

    #[test]
    fn the_page_is_self_contained() {
        let settings = LabSettings::new("manylane lab '<&>'".into(), &Paper::ALL, Vec::new(), Scale::quick());
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
        assert_eq!(page.matches("Quick run:").count(), 2, "at the top and below");
        assert!(!page.contains("no <device>") && page.contains("no &lt;device&gt;"));
        assert!(page.contains("&lt;&amp;&gt;"));
    }
}
