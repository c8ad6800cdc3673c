//! The documents that `--json` prints. From the first release on, a reader may rely on every field
//! for as long as the number at the end of the schema's name stays the same.

use serde::Serialize;

use crate::machine::Machine;

/// One result: the machine, the settings, and all figures.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Document<S, R> {
    /// `manylane.NAME.vN`.
    pub schema: String,
    /// The machine that ran it.
    pub machine: Machine,
    /// The options in force, including defaults, and the command line.
    pub settings: S,
    /// The results.
    pub rows: Vec<R>,
}

impl<S, R> Document<S, R> {
    /// A document about this machine.
    pub fn new(schema: &str, settings: S, rows: Vec<R>) -> Self {
        Self { schema: schema.into(), machine: Machine::read(), settings, rows }
    }
}

/// A number with a unit prefix: 1.25M, 350k, 42.
#[must_use]
pub fn format_number(value: f64) -> String {
    let short = |value: f64, unit: &str| {
        let digits = if value >= 100.0 || value == value.trunc() {
            0
        } else if value >= 10.0 {
            1
        } else {
            2
        };
        format!("{value:.digits$}{unit}")
    };
    match value {
        _ if value >= 1e6 => short(value / 1e6, "M"),
        _ if value >= 1e4 => short(value / 1e3, "k"),
        _ => short(value, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted_briefly() {
        let cases = [
            (0.0, "0"),
            (512.4, "512"),
            (42.0, "42"),
            (1.255, "1.25"),
            (350_000.0, "350k"),
            (1.25e6, "1.25M"),
        ];
        for (value, text) in cases {
            assert_eq!(format_number(value), text);
        }
    }
}
