//! What the tables say, by rules. All gains are differences to the default of the same run.

use super::{RUNS, TABLE_1, TABLE_2, cores, latency, throughput};
use crate::lab::Rows;
use crate::lab::table::short;
use crate::lab::words::percent;

/// The conclusion.
pub(in crate::lab) fn conclude(rows: &Rows<'_>) -> Vec<String> {
    [throughput(rows), lanes(rows), latency(rows), fastest(rows), cores_said(rows)]
        .into_iter()
        .flatten()
        .collect()
}

/// Mean change against `default` over all runs that have both, in what `of` looks up.
fn change(of: &dyn Fn(&str, &str) -> Option<f64>, default: &str, column: &str) -> Option<f64> {
    let each = RUNS.iter().filter_map(|run| Some(of(run, column)? / of(run, default)? - 1.0));
    let each: Vec<f64> = each.filter(|change| change.is_finite()).collect();
    (!each.is_empty()).then(|| each.iter().sum::<f64>() / each.len() as f64)
}

/// `name +1.0 % (paper +2.0 %)` for each column that we have.
fn changes(rows: &Rows<'_>, table: &str, default: &str, columns: &[&str]) -> Vec<String> {
    let ours = |run: &str, column: &str| rows.value(table, run, column);
    let theirs = |run: &str, column: &str| rows.printed(table, run, column);
    let told = columns.iter().filter_map(|column| {
        let own = change(&ours, default, column)?;
        Some(match change(&theirs, default, column) {
            Some(paper) => format!("{column} {} (paper {})", percent(own), percent(paper)),
            None => format!("{column} {}", percent(own)),
        })
    });
    told.collect()
}

fn throughput(rows: &Rows<'_>) -> Option<String> {
    let columns = [throughput::NUMA, throughput::ADDRESSES, throughput::THREADS, throughput::BOUND];
    let told = changes(rows, TABLE_1, throughput::DEFAULT, &columns);
    (!told.is_empty()).then(|| format!("Datagrams per second, against the default: {}.", told.join(", ")))
}

fn lanes(rows: &Rows<'_>) -> Option<String> {
    let told = changes(rows, TABLE_1, throughput::DEFAULT, &throughput::LANES);
    (!told.is_empty()).then(|| format!("Lanes: {}.", told.join(", ")))
}

fn latency(rows: &Rows<'_>) -> Option<String> {
    let columns = [latency::PINNED, latency::BUSY, latency::POLLING];
    let told = changes(rows, TABLE_2, latency::DEFAULT, &columns);
    (!told.is_empty()).then(|| format!("Round-trip times, against the default: {}.", told.join(", ")))
}

/// The best of ours.
fn fastest(rows: &Rows<'_>) -> Option<String> {
    let ours = |run: &str, column: &str| rows.value(TABLE_2, run, column);
    let best = latency::LANES
        .iter()
        .filter_map(|column| Some((column, change(&ours, latency::DEFAULT, column)?)))
        .min_by(|a, b| a.1.total_cmp(&b.1))?;
    let theirs = |run: &str, column: &str| rows.printed(TABLE_2, run, column);
    let paper = change(&theirs, latency::DEFAULT, latency::POLLING)?;
    let verdict = if best.1 < paper { "more than" } else { "less than" };
    Some(format!(
        "Of the lanes {} answers fastest, {}: {verdict} the paper's best gain ({}).",
        best.0,
        percent(best.1),
        percent(paper)
    ))
}

fn cores_said(rows: &Rows<'_>) -> Option<String> {
    let (shared, apart) = cores::slower(rows);
    let apart =
        apart.map(|ratio| format!("{} times as long beside another one on a second core", short(ratio)));
    let shared =
        shared.map(|ratio| format!("{} times as long beside another one on the same core", short(ratio)));
    let told: Vec<String> = [shared, apart].into_iter().flatten().collect();
    (!told.is_empty()).then(|| format!("A loop takes {}.", told.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::{Paper, Row, merge};

    fn said(rows: Vec<Row>) -> String {
        let rows = rows.into_iter().map(|row| Row { paper: Paper::Priambodo, ..row }).collect();
        let merged = merge(Paper::Priambodo, rows, &super::super::printed(), true);
        conclude(&Rows::of(Paper::Priambodo, &merged)).join(" ")
    }

    #[test]
    fn gains_are_differences_ours_and_the_papers() {
        let cell = |table, column, value| Row::new(table, "1", column, "", vec![value]);
        let said = said(vec![
            cell(TABLE_1, throughput::DEFAULT, 400_000.0),
            cell(TABLE_1, throughput::BOUND, 500_000.0),
            cell(TABLE_1, "lane/xdp", 2_000_000.0),
            cell(TABLE_2, latency::DEFAULT, 0.02),
            cell(TABLE_2, latency::POLLING, 0.01),
            cell(TABLE_2, "lane/xdp, spin", 0.005),
        ]);
        // 250.44 % of the default is what the paper calls an increase of that much.
        assert!(said.contains("binding port +25.0 % (paper +150.7 %)"), "{said}");
        assert!(said.contains("lane/xdp +400.0 %"), "{said}");
        assert!(said.contains("polling in the program -50.0 % (paper -34.7 %)"), "{said}");
        assert!(
            said.contains("lane/xdp, spin answers fastest, -75.0 %: more than the paper's best gain"),
            "{said}"
        );
    }

    #[test]
    fn nothing_is_said_of_what_was_not_measured() {
        assert_eq!(said(Vec::new()), "");
    }
}
