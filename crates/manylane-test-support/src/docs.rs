//! Tables of docs/ that are generated from the code.

#![expect(clippy::unwrap_used, reason = "a test fails by it")]

use std::sync::{Mutex, PoisonError};

/// Checks that `section` of `docs/FILE` is a table with this head and these rows. With
/// `MANYLANE_WRITE_DOCS=1` in the environment, writes it instead.
#[track_caller]
pub fn check_table<const N: usize>(
    file: &str,
    section: &str,
    head: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) {
    // Tests in parallel may write the same file.
    static WRITER: Mutex<()> = Mutex::new(());
    let _writer = WRITER.lock().unwrap_or_else(PoisonError::into_inner);
    let path = format!("{}/../../docs/{file}", env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(&path).unwrap();
    let start = format!("<!-- {section}: made of the code -->\n");
    let (before, rest) = page.split_once(&start).unwrap();
    let end = "<!-- end of the table -->\n";
    let (shown, after) = rest.split_once(end).unwrap();
    let mut table = format!("\n| {} |\n|{}\n", head.join(" | "), "---|".repeat(N));
    for row in rows {
        table += &format!("| {} |\n", row.join(" | "));
    }
    table.push('\n');
    if std::env::var_os("MANYLANE_WRITE_DOCS").is_some() {
        std::fs::write(&path, [before, &start, &table, end, after].concat()).unwrap();
    } else {
        assert_eq!(shown, table, "docs/{file}: MANYLANE_WRITE_DOCS=1 and this test write it again");
    }
}

/// The rows of a table of metrics, from a page in the text format of Prometheus: the name of each
/// family, its help, and the labels of its first sample.
#[must_use]
pub fn metrics_rows(page: &str) -> Vec<[String; 3]> {
    page.split("# HELP ")
        .skip(1)
        .map(|family| {
            let mut lines = family.lines();
            let (name, help) = lines.next().and_then(|line| line.split_once(' ')).unwrap();
            // Behind the line with the type.
            let sample = lines.nth(1).unwrap();
            let keys = sample.split('"').filter_map(|text| text.strip_suffix('=')?.rsplit(['{', ',']).next());
            let labels: Vec<String> = keys.map(|key| format!("`{key}`")).collect();
            [format!("`{name}`"), help.to_owned(), labels.join(", ")]
        })
        .collect()
}
