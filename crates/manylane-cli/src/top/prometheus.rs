//! Reads the text format of Prometheus, as far as our own pages use it. Unknown lines are skipped:
//! the process may be of a later version, or may be an impostor.

/// One line of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sample<'a> {
    pub(crate) name: &'a str,
    labels: Vec<(&'a str, String)>,
    pub(crate) value: u64,
}

impl Sample<'_> {
    /// The value of a label; empty without it.
    pub(crate) fn label(&self, name: &str) -> &str {
        self.labels.iter().find(|(label, _)| *label == name).map_or("", |(_, text)| text)
    }
}

/// The samples of a page.
pub(crate) fn parse_samples(page: &str) -> impl Iterator<Item = Sample<'_>> {
    page.lines().filter(|line| !line.starts_with('#')).filter_map(parse_sample)
}

fn parse_sample(line: &str) -> Option<Sample<'_>> {
    let Some((name, rest)) = line.split_once('{') else {
        let (name, value) = line.split_once(' ')?;
        return Some(Sample { name, labels: Vec::new(), value: value.parse().ok()? });
    };
    let (mut rest, mut labels) = (rest, Vec::new());
    while !rest.starts_with('}') {
        let (label, behind) = rest.split_once("=\"")?;
        let (text, behind) = parse_quoted(behind)?;
        labels.push((label, text));
        rest = behind.strip_prefix(',').unwrap_or(behind);
    }
    Some(Sample { name, labels, value: rest.strip_prefix("} ")?.parse().ok()? })
}

/// Maximum number of rows that are taken from a page, more than any of our own has: a program may
/// put anything on its page, and root may read those of many.
pub(crate) const ROWS_MAX: usize = 4096;
/// Maximum length of a label's text in bytes, more than any of our own has. The rest is dropped.
const LABEL_LEN_MAX: usize = 128;

/// The quoted text, and the text after it.
fn parse_quoted(text: &str) -> Option<(String, &str)> {
    let mut out = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        let c = match c {
            '"' => return Some((out, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => '\n',
                other => other,
            },
            c => c,
        };
        // The text is printed on a terminal, and kept as long as the sample.
        if !c.is_control() && out.len() < LABEL_LEN_MAX {
            out.push(c);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pages_are_read() {
        let page = "# TYPE x counter\nx 5\ny{a=\"1\",b=\"q\\\"\\\\,}\"} 7\nz{} 1\nbroken{a=\"1} 2\nw -1\n\nv{a=\"\x1b[2J\"} 3\nu{a=\"\\\x1b[2J\\nx\"} 4";
        let all: Vec<Sample<'_>> = parse_samples(page).collect();
        let names: Vec<(&str, u64)> = all.iter().map(|sample| (sample.name, sample.value)).collect();
        assert_eq!(names, [("x", 5), ("y", 7), ("z", 1), ("v", 3), ("u", 4)]);
        assert_eq!((all[1].label("b"), all[1].label("c"), all[3].label("a")), ("q\"\\,}", "", "[2J"));
        assert_eq!(all[4].label("a"), "[2Jx", "what is escaped");
    }

    proptest! {
        #[test]
        fn long_fields_of_other_processes_are_bounded(page in ".{0,200}") {
            parse_samples(&page).for_each(drop);
        }
    }
}
