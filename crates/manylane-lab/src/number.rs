//! Numbers in text.

/// A number with about three significant digits.
pub(crate) fn format_number(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if size >= 100_000.0 => group_thousands(value),
        _ if size >= 100.0 => format!("{value:.0}"),
        _ if size >= 10.0 => format!("{value:.1}"),
        _ if size >= 1.0 => format!("{value:.2}"),
        _ if size == 0.0 => "0".into(),
        _ if size >= 0.001 => format!("{value:.4}"),
        _ => format!("{value:.2e}"),
    }
}

fn group_thousands(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::from(if value < 0.0 { "-" } else { "" });
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_significant_digits() {
        let cases = [
            (0.0, "0"),
            (0.16133, "0.1613"),
            (58.2, "58.2"),
            (451_300.0, "451,300"),
            (1_234_567.0, "1,234,567"),
            (999.6, "1000"),
            (0.0000123, "1.23e-5"),
            (-5.25, "-5.25"),
        ];
        for (value, text) in cases {
            assert_eq!(format_number(value), text);
        }
    }
}
