//! Phrases for numbers, for the rules that make sentences.

use super::table::format_number;

/// `1.9 times`; a ratio within 5 % of 1 is called equal.
pub(super) fn times_phrase(ratio: f64) -> String {
    if (0.95..=1.05).contains(&ratio) {
        "as much as".into()
    } else {
        format!("{} times", format_number(ratio))
    }
}

/// `1.90 times as long`.
pub(super) fn duration_phrase(ratio: f64) -> String {
    if (0.95..=1.05).contains(&ratio) {
        "about as long".into()
    } else {
        format!("{} times as long", format_number(ratio))
    }
}

/// The ratio of two figures, if both exist and the ratio is meaningful.
pub(super) fn ratio(value: Option<f64>, to: Option<f64>) -> Option<f64> {
    let (value, to) = (value?, to?);
    (to > 0.0 && value.is_finite()).then(|| value / to)
}

/// A share in per cent, with its sign.
pub(super) fn format_percent(change: f64) -> String {
    format!("{:+.1} %", change * 100.0)
}

/// The smallest of some named figures.
pub(super) fn min_by_value<'a>(figures: impl IntoIterator<Item = (&'a str, f64)>) -> Option<(&'a str, f64)> {
    figures.into_iter().filter(|(_, value)| value.is_finite()).min_by(|a, b| a.1.total_cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_in_words() {
        assert_eq!([1.02, 1.9, 0.25].map(times_phrase), ["as much as", "1.90 times", "0.2500 times"]);
        assert_eq!([1.02, 1.9].map(duration_phrase), ["about as long", "1.90 times as long"]);
        assert_eq!(ratio(Some(3.0), Some(0.0)), None);
        assert_eq!(ratio(Some(3.0), Some(2.0)), Some(1.5));
        assert_eq!(format_percent(2.5044), "+250.4 %");
        assert_eq!(min_by_value([("a", 3.0), ("b", 2.0), ("c", f64::NAN)]), Some(("b", 2.0)));
    }
}
