//! The conclusion from the tables, by rules. All gains are differences from the default of the
//! same run.

use super::{RUNS, TABLE_1, TABLE_2, cores, latency, throughput};
use crate::Rows;
use crate::phrases::format_percent;
use crate::table::format_number;
use manylane_bench::stats::median;

/// The conclusion.
pub(crate) fn conclude(rows: &Rows<'_>) -> Vec<String> {
    [throughput(rows), lanes(rows), latency(rows), fastest(rows), core_sharing(rows)]
        .into_iter()
        .flatten()
        .collect()
}

/// Change against `default` of each run that has both.
fn relative_changes(of: &dyn Fn(&str, &str) -> Option<f64>, default: &str, column: &str) -> Vec<f64> {
    let each = RUNS.iter().filter_map(|run| Some(of(run, column)? / of(run, default)? - 1.0));
    each.filter(|change| change.is_finite()).collect()
}

/// The median of ours, because one disturbed run would spoil a mean.
fn measured_change(rows: &Rows<'_>, table: &str, default: &str, column: &str) -> Option<f64> {
    let each = relative_changes(&|run, column| rows.value(table, run, column), default, column);
    (!each.is_empty()).then(|| median(each))
}

/// The paper's mean, as printed.
fn paper_change(rows: &Rows<'_>, table: &str, default: &str, column: &str) -> Option<f64> {
    let each = relative_changes(&|run, column| rows.paper_value(table, run, column), default, column);
    (!each.is_empty()).then(|| each.iter().sum::<f64>() / each.len() as f64)
}

/// `name +1.0 % (paper +2.0 %)` for each column that we have.
fn describe_changes(rows: &Rows<'_>, table: &str, default: &str, columns: &[&str]) -> Vec<String> {
    let told = columns.iter().filter_map(|column| {
        let own = measured_change(rows, table, default, column)?;
        let each = relative_changes(&|run, column| rows.value(table, run, column), default, column);
        let [less, more] = [f64::min, f64::max].map(|pick| each.iter().copied().reduce(pick).unwrap_or(own));
        // The runs disagree.
        let doubt = if less < 0.0 && more > 0.0 {
            format!(" ({} to {}: may be chance)", format_percent(less), format_percent(more))
        } else {
            String::new()
        };
        Some(match paper_change(rows, table, default, column) {
            Some(paper) => {
                format!("{column} {}{doubt} (paper {})", format_percent(own), format_percent(paper))
            }
            None => format!("{column} {}{doubt}", format_percent(own)),
        })
    });
    told.collect()
}

fn throughput(rows: &Rows<'_>) -> Option<String> {
    let columns = [
        throughput::NUMA,
        throughput::NUMA_REMOTE,
        throughput::ADDRESSES,
        throughput::THREADS,
        throughput::PORT_BINDING,
    ];
    let told = describe_changes(rows, TABLE_1, throughput::DEFAULT, &columns);
    // The reason why there is no other node is the result for NUMA here.
    let far =
        RUNS.iter().find_map(|run| rows.cell(TABLE_1, run, throughput::NUMA_REMOTE)?.why_not.as_deref());
    let near = measured_change(rows, TABLE_1, throughput::DEFAULT, throughput::NUMA);
    let note = match (near, far) {
        (Some(_), Some(why)) => format!(" Of NUMA: {why}."),
        _ => String::new(),
    };
    (!told.is_empty()).then(|| {
        format!(
            "Datagrams per second, against the default, in the middle of the runs: {}.{note}",
            told.join(", ")
        )
    })
}

fn lanes(rows: &Rows<'_>) -> Option<String> {
    let told = describe_changes(rows, TABLE_1, throughput::DEFAULT, &throughput::LANES);
    (!told.is_empty()).then(|| format!("Lanes: {}.", told.join(", ")))
}

fn latency(rows: &Rows<'_>) -> Option<String> {
    let columns = [latency::PINNED, latency::BUSY_POLL, latency::POLLING];
    let told = describe_changes(rows, TABLE_2, latency::DEFAULT, &columns);
    (!told.is_empty()).then(|| format!("Round-trip times, against the default: {}.", told.join(", ")))
}

/// The best lane.
fn fastest(rows: &Rows<'_>) -> Option<String> {
    let best = latency::LANES
        .iter()
        .filter_map(|column| Some((column, measured_change(rows, TABLE_2, latency::DEFAULT, column)?)))
        .min_by(|a, b| a.1.total_cmp(&b.1))?;
    let paper = paper_change(rows, TABLE_2, latency::DEFAULT, latency::POLLING)?;
    let verdict = if best.1 < paper { "more than" } else { "less than" };
    Some(format!(
        "Of the lanes {} answers fastest, {}: {verdict} the paper's best gain ({}).",
        best.0,
        format_percent(best.1),
        format_percent(paper)
    ))
}

fn core_sharing(rows: &Rows<'_>) -> Option<String> {
    let [shared, apart] = cores::slowdown(rows);
    let said = |seen: Option<(f64, Option<f64>)>, core: &str| {
        let (ratio, handed) = seen?;
        let handed = handed
            .map_or_else(String::new, |ns| format!(" (a cache line takes {} ns to it)", format_number(ns)));
        Some(format!("{} times as long beside another one on {core}{handed}", format_number(ratio)))
    };
    let told: Vec<String> =
        [said(shared, "the same core"), said(apart, "a second core")].into_iter().flatten().collect();
    (!told.is_empty()).then(|| format!("A loop takes {}.", told.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Paper, Row, merge};

    fn conclusion_text(rows: Vec<Row>) -> String {
        let rows = rows.into_iter().map(|row| Row { paper: Paper::Priambodo, ..row }).collect();
        let merged = merge(Paper::Priambodo, rows, &super::super::paper_values(), true);
        conclude(&Rows::for_paper(Paper::Priambodo, &merged)).join(" ")
    }

    #[test]
    fn gains_are_differences_ours_and_the_papers() {
        let cell = |table, column, value| Row::new(table, "1", column, "", vec![value]);
        let said = conclusion_text(vec![
            cell(TABLE_1, throughput::DEFAULT, 400_000.0),
            cell(TABLE_1, throughput::PORT_BINDING, 500_000.0),
            cell(TABLE_1, "lane/xdp", 2_000_000.0),
            cell(TABLE_2, latency::DEFAULT, 0.02),
            cell(TABLE_2, latency::POLLING, 0.01),
            cell(TABLE_2, "lane/xdp, spin", 0.005),
        ]);
        // The paper calls 250.44 % of the default an increase of that much.
        assert!(said.contains("binding port +25.0 % (paper +150.7 %)"), "{said}");
        assert!(said.contains("lane/xdp +400.0 %"), "{said}");
        assert!(said.contains("polling in the program -50.0 % (paper -34.7 %)"), "{said}");
        assert!(
            said.contains("lane/xdp, spin answers fastest, -75.0 %: more than the paper's best gain"),
            "{said}"
        );
    }

    #[test]
    fn a_machine_of_one_node_says_so_beside_what_binding_costs() {
        let cell = |column, value| Row::new(TABLE_1, "1", column, "", vec![value]);
        let said = conclusion_text(vec![
            cell(throughput::DEFAULT, 400_000.0),
            cell(throughput::NUMA, 392_000.0),
            Row::unavailable(TABLE_1, "1", throughput::NUMA_REMOTE, "1/s", "this machine has one NUMA node"),
        ]);
        assert!(
            said.contains("NUMA -2.0 % (paper -4.8 %). Of NUMA: this machine has one NUMA node."),
            "{said}"
        );
    }

    #[test]
    fn one_run_that_went_wrong_does_not_make_the_gain() {
        let run = |run: &str, default, bound| {
            [(throughput::DEFAULT, default), (throughput::PORT_BINDING, bound)]
                .map(|(column, value)| Row::new(TABLE_1, run, column, "", vec![value]))
        };
        let runs = [run("1", 400.0, 500.0), run("2", 4.0, 500.0), run("3", 400.0, 480.0)];
        assert!(conclusion_text(runs.concat()).contains("binding port +25.0 % (paper"), "all say so");
        let runs = [run("1", 400.0, 500.0), run("2", 400.0, 300.0), run("3", 400.0, 420.0)];
        assert!(
            conclusion_text(runs.concat())
                .contains("binding port +5.0 % (-25.0 % to +25.0 %: may be chance) (paper")
        );
    }

    #[test]
    fn a_second_core_is_told_by_loop_and_line() {
        let cell = |line, column, value| Row::new(super::super::CORES, line, column, "", vec![value]);
        let said = conclusion_text(vec![
            cell("one thread", "ms", 100.0),
            cell("two threads, two cores", "ms", 104.0),
            cell("two threads, two cores", "line handed over, ns", 52.0),
        ]);
        assert_eq!(
            said,
            "A loop takes 1.04 times as long beside another one on a second core (a cache line takes 52.0 ns to it)."
        );
    }

    #[test]
    fn nothing_is_said_of_what_was_not_measured() {
        assert_eq!(conclusion_text(Vec::new()), "");
    }
}
