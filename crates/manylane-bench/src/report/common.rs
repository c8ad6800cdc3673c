//! Common parts of the pages of small benchmarks: title, sentences, sections with plots, and the
//! settings.

use std::fmt::Write as _;

use anyhow::Result;

use super::{about, escape, figure, plots, subtitle};
use crate::schema::{BenchSettings, Document};
use crate::stats::Summary;

/// A page with the sentences of `said` and the sections of `body`.
pub(super) fn page<R>(
    document: &Document<BenchSettings, R>,
    said: &[String],
    body: impl FnOnce(&mut String) -> Result<()>,
) -> Result<String> {
    let name = document.schema.trim_start_matches("manylane.").trim_end_matches(".v1").replace('.', " ");
    let title = format!("manylane {name}");
    let mut page = String::with_capacity(128 << 10);
    write!(page, include_str!("head.html"), title = escape(&title))?;
    write!(page, "<h1>{}</h1>\n<p class=lead>{}</p>\n", escape(&title), escape(&subtitle(document)))?;
    if !said.is_empty() {
        page.push_str("<section><h3>What this run says</h3>\n<ul class=says>\n");
        for sentence in said {
            writeln!(page, "<li>{}</li>", escape(sentence))?;
        }
        page.push_str("</ul></section>\n");
    }
    body(&mut page)?;
    about(&mut page, document)?;
    page += "</main></body></html>\n";
    Ok(page)
}

/// The texts of a plot: its title, its caption, its axes.
#[derive(Clone, Copy)]
pub(super) struct PlotLabels<'a> {
    pub(super) title: &'a str,
    pub(super) caption: &'a str,
    pub(super) x: &'a str,
    pub(super) y: &'a str,
}

/// Samples of each of `names` at each of `places`, with lines that join the medians. Empty without
/// samples.
pub(super) fn samples(
    page: &mut String,
    words: PlotLabels<'_>,
    places: &[String],
    names: &[&str],
    at: impl Fn(usize, usize) -> Vec<f64>,
) -> Result<()> {
    let series: Vec<plots::Series> = (0..names.len())
        .map(|name| {
            let samples: Vec<Vec<f64>> = (0..places.len()).map(|place| at(name, place)).collect();
            let middle =
                |samples: &Vec<f64>| Summary::from_samples(samples.iter().copied()).map(|all| all.median);
            plots::Series {
                printed: false,
                colour: name,
                values: samples.iter().map(middle).collect(),
                samples,
            }
        })
        .collect();
    if series.iter().all(|line| line.values.iter().all(Option::is_none)) {
        return Ok(());
    }
    let caption = format!("{} Lines join medians; each faint dot is one sample.", words.caption);
    let svg = plots::lines(places, words.x, words.y, &series)?;
    figure(page, words.title, caption.trim_start(), &legend(names), &svg);
    Ok(())
}

/// A bar for each of `names` at each of `places`, with a dark line at the value of `most`, if any.
pub(super) fn bars(
    page: &mut String,
    words: PlotLabels<'_>,
    places: &[String],
    names: &[&str],
    at: impl Fn(usize, usize) -> Option<(f64, Option<f64>)>,
) -> Result<()> {
    let series = |value: &dyn Fn(usize, usize) -> Option<f64>| -> Vec<plots::Series> {
        let one = |name| plots::Series {
            printed: false,
            colour: name,
            values: (0..places.len()).map(|place| value(name, place)).collect(),
            samples: Vec::new(),
        };
        (0..names.len()).map(one).collect()
    };
    let middle = series(&|name, place| at(name, place).map(|value| value.0));
    let most = series(&|name, place| at(name, place)?.1);
    let svg = plots::bars(places, words.x, words.y, &middle, &most)?;
    figure(page, words.title, words.caption, &legend(names), &svg);
    Ok(())
}

fn legend(names: &[&str]) -> String {
    let entry = |(colour, name): (usize, &&str)| {
        format!("<li><i style=\"background:var(--s{})\"></i>{}</li>", colour % plots::COLOURS, escape(name))
    };
    format!("<ul class=legend>{}</ul>", names.iter().enumerate().map(entry).collect::<String>())
}

/// A table; rows of lanes are highlighted.
pub(super) fn table(page: &mut String, header: &[&str], lines: &[Vec<String>]) {
    page.push_str("<h3>All figures</h3><div class=wide><table><thead><tr>");
    header.iter().for_each(|name| _ = write!(page, "<th>{}", escape(name)));
    page.push_str("</tr></thead><tbody>\n");
    for line in lines {
        page.push_str(if line.iter().any(|cell| cell.starts_with("lane/")) {
            "<tr class=ours>"
        } else {
            "<tr>"
        });
        line.iter().for_each(|cell| _ = write!(page, "<td>{}", escape(cell)));
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table></div>\n");
}
