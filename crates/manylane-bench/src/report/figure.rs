//! The figures of a page: series of samples over named places, with their legend; its texts.

use std::fmt::Write as _;

use anyhow::Result;

use super::plots::{self, COLOURS, Series};
use crate::stats::{distinct, median_of};

/// Kind of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Lines that join the medians, and the samples as dots.
    Lines,
    /// A group of bars for each place.
    Bars,
    /// A row of bars for each place, whose names may be long.
    Rows,
}

/// The texts of a figure: its title, its caption, its axes.
#[derive(Clone, Copy, Debug)]
pub struct Labels<'a> {
    /// Title.
    pub title: &'a str,
    /// Caption.
    pub caption: &'a str,
    /// Name of the axis of places.
    pub x: &'a str,
    /// Name of the axis of values.
    pub y: &'a str,
}

/// A figure of a page.
#[derive(Debug)]
pub struct Figure {
    title: String,
    caption: String,
    x: String,
    y: String,
    shape: Shape,
    places: Vec<String>,
    series: Vec<Series>,
    /// A dark line at each bar.
    outlined: Vec<Series>,
}

impl Figure {
    /// A figure of `series` over `places`.
    #[must_use]
    pub fn new(labels: Labels<'_>, shape: Shape, places: Vec<String>, series: Vec<Series>) -> Self {
        let Labels { title, caption, x, y } = labels;
        let [title, caption, x, y] = [title, caption, x, y].map(str::to_owned);
        Self { title, caption, x, y, shape, places, series, outlined: Vec::new() }
    }

    /// Lines for the samples of each of `names` at each of `places`.
    #[must_use]
    pub fn lines(
        labels: Labels<'_>,
        names: &[String],
        places: &[String],
        at: impl Fn(usize, usize) -> Vec<f64>,
    ) -> Self {
        let colours = colours(names);
        let one = |(name, text): (usize, &String)| {
            let samples: Vec<Vec<f64>> = (0..places.len()).map(|place| at(name, place)).collect();
            let values = samples.iter().map(|samples| median_of(samples)).collect();
            Series { name: text.clone(), colour: colours[name], values, samples, printed: false }
        };
        Self::new(labels, Shape::Lines, places.to_vec(), names.iter().enumerate().map(one).collect())
    }

    /// A bar for each of `names` at each of `places`, with a dark line at the second value.
    /// Places without a bar are left out.
    #[must_use]
    pub fn bars(
        labels: Labels<'_>,
        names: &[String],
        places: &[String],
        at: impl Fn(usize, usize) -> (Option<f64>, Option<f64>),
    ) -> Self {
        let has_bar = |place: &usize| (0..names.len()).any(|name| at(name, *place).0.is_some());
        let shown: Vec<usize> = (0..places.len()).filter(has_bar).collect();
        let colours = colours(names);
        let series = |value: &dyn Fn(usize, usize) -> Option<f64>| -> Vec<Series> {
            let one = |(name, text): (usize, &String)| Series {
                name: text.clone(),
                colour: colours[name],
                values: shown.iter().map(|&place| value(name, place)).collect(),
                samples: Vec::new(),
                printed: false,
            };
            names.iter().enumerate().map(one).collect()
        };
        let (bars, outlined) =
            (series(&|name, place| at(name, place).0), series(&|name, place| at(name, place).1));
        let places = shown.iter().map(|&place| places[place].clone()).collect();
        Self { outlined, ..Self::new(labels, Shape::Bars, places, bars) }
    }

    /// Writes the figure, unless nothing was measured.
    pub fn write(&self, page: &mut String) -> Result<()> {
        if self.series.iter().all(|line| line.values.iter().all(Option::is_none)) {
            return Ok(());
        }
        let svg = match self.shape {
            Shape::Lines => plots::lines(&self.places, &self.x, &self.y, &self.series)?,
            Shape::Bars => plots::bars(&self.places, &self.x, &self.y, &self.series, &self.outlined)?,
            Shape::Rows => plots::horizontal_bars(&self.places, &self.y, &self.series)?,
        };
        let mut legend = String::new();
        for series in &self.series {
            let swatch = match series.printed {
                true => "class=printed style=\"border-color:",
                false => "style=\"background:",
            };
            let colour = series.colour % COLOURS;
            write!(legend, "<li><i {swatch}var(--s{colour})\"></i>{}</li>", escape(&series.name))?;
        }
        let how = match self.shape {
            Shape::Lines => " Lines join medians; each faint dot is one sample.",
            Shape::Bars | Shape::Rows => " Medians.",
        };
        let printed = match (self.series.iter().any(|line| line.printed), self.shape) {
            (false, _) => "",
            (true, Shape::Lines) => " Dashed: the paper's values.",
            (true, _) => " Hollow: the paper's values.",
        };
        writeln!(
            page,
            "<figure><h3>{}</h3><ul class=legend>{legend}</ul><div class=plot>{svg}</div>\
             <figcaption>{}</figcaption></figure>",
            escape(&self.title),
            escape(format!("{}{how}{printed}", self.caption).trim_start())
        )?;
        Ok(())
    }
}

/// The colour of a receiver, in all figures; the first one is that of lanes.
pub(super) fn colour(name: &str) -> Option<usize> {
    const NAMES: [&str; 11] = [
        "lane/mmsg",
        "socket/recvfrom",
        "socket/recvmmsg",
        "reuseport/recvmmsg",
        "reuseport/gro",
        "xsk/raw",
        "lane/xdp",
        "uring/plain",
        "lane/uring",
        "xsk/checked",
        "uring/single",
    ];
    NAMES.iter().position(|known| *known == name)
}

/// Known receivers have the same colour in all figures; other names have one each.
fn colours(names: &[String]) -> Vec<usize> {
    let known: Option<Vec<usize>> = names.iter().map(|name| colour(name)).collect();
    known.unwrap_or_else(|| (0..names.len()).collect())
}

/// Rows by the name of their series and by their place.
pub struct Grid<'a, R> {
    rows: &'a [&'a R],
    names: Vec<String>,
    places: Vec<String>,
    x: &'static str,
    key: fn(&R) -> (String, String),
}

impl<'a, R> Grid<'a, R> {
    /// `key` returns the name and the place of a row; `x` names the axis of places.
    #[must_use]
    pub fn new(rows: &'a [&'a R], x: &'static str, key: fn(&R) -> (String, String)) -> Self {
        let names = distinct(rows.iter().map(|row| key(row).0));
        let places = distinct(rows.iter().map(|row| key(row).1));
        Self { rows, names, places, x, key }
    }

    fn at(&self, name: usize, place: usize) -> Option<&R> {
        let is_there = |row: &&&R| (self.key)(row) == (self.names[name].clone(), self.places[place].clone());
        self.rows.iter().find(is_there).copied()
    }

    /// Lines of the samples.
    #[must_use]
    pub fn lines(&self, title: &str, caption: &str, y: &str, samples: impl Fn(&R) -> Vec<f64>) -> Figure {
        Figure::lines(Labels { title, caption, x: self.x, y }, &self.names, &self.places, |name, place| {
            self.at(name, place).map(&samples).unwrap_or_default()
        })
    }

    /// Bars of the first value, with a dark line at the second.
    #[must_use]
    pub fn bars(
        &self,
        title: &str,
        caption: &str,
        y: &str,
        values: impl Fn(&R) -> (Option<f64>, Option<f64>),
    ) -> Figure {
        Figure::bars(Labels { title, caption, x: self.x, y }, &self.names, &self.places, |name, place| {
            self.at(name, place).map_or((None, None), &values)
        })
    }
}

/// Text as HTML.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
