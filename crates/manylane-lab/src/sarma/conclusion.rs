//! The conclusion from tables and figures, by rules.

use super::descriptor::{Column, call_cost, lookup_cost, write_cost};
use super::flood::{self, RxPath};
use super::{COST, FIGURE_9, TABLE_1, atomics, hot_path, starvation};
use crate::Rows;
use crate::cpu_distance;
use crate::phrases::{format_percent, ratio, times_phrase};
use crate::table::format_number;

/// The conclusion.
pub(crate) fn conclude(rows: &Rows<'_>) -> Vec<String> {
    let rules = [atomic, line_transfer, hot_path, descriptor, writes, grace_period, memory, starvation];
    rules.into_iter().filter_map(|rule| rule(rows)).collect()
}

/// The paper's point about Table 1: atomic operations compared with an L2 hit.
fn atomic(rows: &Rows<'_>) -> Option<String> {
    let ours = ratio(rows.value(TABLE_1, atomics::INCREMENT, COST), rows.value(TABLE_1, atomics::L2, COST))?;
    let paper = ratio(
        rows.paper_value(TABLE_1, atomics::INCREMENT, COST),
        rows.paper_value(TABLE_1, atomics::L2, COST),
    )?;
    Some(format!(
        "An atomic increment on a line of one's own costs {} a hit in the second cache (paper: {}): {}.",
        times_phrase(ours),
        times_phrase(paper),
        if ours < paper / 2.0 {
            "by itself it has become cheap"
        } else {
            "by itself it is as dear as it was"
        }
    ))
}

/// The cost of sharing.
fn line_transfer(rows: &Rows<'_>) -> Option<String> {
    let ours = ratio(
        rows.value(TABLE_1, atomics::INCREMENT_TRANSFER, COST),
        rows.value(TABLE_1, atomics::INCREMENT, COST),
    )?;
    let paper = ratio(
        rows.paper_value(TABLE_1, atomics::INCREMENT_TRANSFER, COST),
        rows.paper_value(TABLE_1, atomics::INCREMENT, COST),
    )?;
    let handed = rows.value(TABLE_1, atomics::LINE_HANDOVER, COST);
    let one_core = handed.is_some_and(cpu_distance::is_same_core);
    let verdict = match ours {
        _ if one_core => "but the two processors are threads of one core, and share its first cache",
        _ if ours > paper => "what is dear is sharing, more than it was then",
        _ => "what is dear is sharing, though no more than it was then",
    };
    let handed = handed.map_or_else(String::new, |ns| {
        let who = if one_core { "two threads of one core" } else { "two cores" };
        format!(" One hands a line over to the other in {} ns, as {who} do.", format_number(ns))
    });
    Some(format!(
        "On a line that the other processor has just written it costs {} that (paper: {}): {verdict}.{handed}",
        times_phrase(ours),
        times_phrase(paper)
    ))
}

fn hot_path(rows: &Rows<'_>) -> Option<String> {
    let (_, shared) = hot_path::contentions(rows, "socket/recvfrom, 2")?;
    let mut lanes = Vec::new();
    for line in ["lane/mmsg", "lane/uring", "lane/xdp"] {
        if let Some((_, waits)) = hot_path::contentions(rows, &format!("{line}, 2")) {
            lanes.push(format!("{line} {}", format_number(waits)));
        }
    }
    (!lanes.is_empty()).then(|| {
        format!(
            "Two threads that read one socket wait for its locks {} times in a million datagrams; with a lane each: {}.",
            format_number(shared),
            lanes.join(", ")
        )
    })
}

fn descriptor(rows: &Rows<'_>) -> Option<String> {
    let (own, shared) = (call_cost(rows, Column::Own)?, call_cost(rows, Column::Shared)?);
    let mut text = format!(
        "A call on a descriptor costs {} ns in a table of one's own and {} ns in one that is shared",
        format_number(own),
        format_number(shared)
    );
    if let Some(both) = call_cost(rows, Column::SharedBusy) {
        text += &format!(", {} ns while another thread calls on the same socket", format_number(both));
    }
    let looked =
        lookup_cost(rows, false, Column::SharedBusy).or_else(|| lookup_cost(rows, false, Column::Shared));
    let registered =
        lookup_cost(rows, true, Column::SharedBusy).or_else(|| lookup_cost(rows, true, Column::Shared));
    if let (Some(looked), Some(registered)) = (looked, registered) {
        text += &format!(
            "; by io_uring, finding the file takes {} ns by its descriptor and {} ns if it is registered",
            format_number(looked.max(0.0)),
            format_number(registered.max(0.0))
        );
    }
    Some(text + ".")
}

fn writes(rows: &Rows<'_>) -> Option<String> {
    let [(light, paper_light), (always, paper_always)] = write_cost(rows)?;
    Some(format!(
        "A shared table makes a million writes of one byte dearer by {} (what fget_light spared in the paper: {}).",
        format_percent(always / light - 1.0),
        format_percent(paper_always / paper_light - 1.0)
    ))
}

fn grace_period(rows: &Rows<'_>) -> Option<String> {
    let [idle, ..] = flood::metrics(rows, RxPath::Idle)?;
    let [flooded, ..] = flood::metrics(rows, RxPath::Softirqs)?;
    let mut text = format!(
        "Under 100,000 datagrams per second from random sources the longest RCU grace period is {} ms ({} ms without a flood; paper: 300 ms)",
        format_number(flooded),
        format_number(idle)
    );
    if let Some([xdp, ..]) = flood::metrics(rows, RxPath::XdpThreaded) {
        text += &format!(", with lane/xdp and threaded NAPI {} ms", format_number(xdp));
    }
    text += if flooded > 100.0 {
        ": floods still hold it up"
    } else {
        ": a flood does not hold it up for long any more"
    };
    Some(text + ".")
}

fn memory(rows: &Rows<'_>) -> Option<String> {
    let [_, grown, neighbours, late, lost] = flood::metrics(rows, RxPath::Softirqs)?;
    let answers = |late: f64, lost: f64| {
        let most = format!("99 % of the answers to a regular client take {} ms or less", format_number(late));
        if lost > 0.0 { format!("{most}, {} % of its requests get none", format_number(lost)) } else { most }
    };
    let mut text = format!(
        "Slabs grow by {} MiB at most, with {} neighbours at most; {}",
        format_number(grown),
        format_number(neighbours),
        answers(late, lost)
    );
    if let Some([_, grown, _, late, lost]) = flood::metrics(rows, RxPath::XdpThreaded) {
        text += &format!(
            "; with lane/xdp and threaded NAPI {} MiB: {}",
            format_number(grown),
            answers(late, lost)
        );
    }
    Some(text + ".")
}

fn starvation(rows: &Rows<'_>) -> Option<String> {
    let (kernel, share) = starvation::metrics(rows, RxPath::Softirqs)?;
    let paper = rows.paper_value(FIGURE_9, RxPath::Softirqs.name(), starvation::LONGEST_GAP)?;
    let mut text = format!(
        "Under the fastest flood a user program beside the server stands still for {} ms at most, {} % of the time in all (paper: more than {} ms)",
        format_number(kernel),
        format_number(share),
        format_number(paper)
    );
    for path in [RxPath::Threaded, RxPath::XdpSoftirqs, RxPath::XdpThreaded, RxPath::Idle] {
        if let Some((longest, share)) = starvation::metrics(rows, path) {
            text += &format!("; {}: {} ms, {} %", path.name(), format_number(longest), format_number(share));
        }
    }
    Some(text + ".")
}

#[cfg(test)]
mod tests {
    use super::super::{FLOOD, TABLE_3_WRITES, descriptor};
    use super::*;
    use crate::{Paper, Row, merge};

    fn conclusion_text(rows: Vec<Row>) -> String {
        let rows = rows.into_iter().map(|row| Row { paper: Paper::Sarma, ..row }).collect();
        let merged = merge(Paper::Sarma, rows, &super::super::paper_values(), true);
        conclude(&Rows::for_paper(Paper::Sarma, &merged)).join(" ")
    }

    fn cost(line: &str, ns: f64) -> Row {
        Row::new(TABLE_1, line, COST, "ns", vec![ns])
    }

    #[test]
    fn nothing_is_said_of_what_was_not_measured() {
        assert_eq!(conclusion_text(Vec::new()), "");
        assert_eq!(conclusion_text(vec![cost(atomics::L2, 4.0)]), "");
    }

    #[test]
    fn atomic_operations_are_judged_by_the_figures() {
        let cheap = conclusion_text(vec![
            cost(atomics::L2, 4.0),
            cost(atomics::INCREMENT, 6.0),
            cost(atomics::INCREMENT_TRANSFER, 90.0),
        ]);
        assert!(cheap.contains("1.50 times a hit in the second cache (paper: 4.51 times)"), "{cheap}");
        assert!(cheap.contains("has become cheap") && cheap.contains("15.0 times that"), "{cheap}");
        assert!(cheap.contains("what is dear is sharing"), "{cheap}");
        let with = |handed| {
            conclusion_text(vec![
                cost(atomics::INCREMENT, 6.0),
                cost(atomics::INCREMENT_TRANSFER, 90.0),
                cost(atomics::LINE_HANDOVER, handed),
            ])
        };
        let one = with(9.0);
        assert!(
            one.contains("share its first cache") && one.contains("as two threads of one core do"),
            "{one}"
        );
        let two = with(50.0);
        assert!(
            two.contains("what is dear is sharing") && two.contains("in 50.0 ns, as two cores do"),
            "{two}"
        );
        let dear = conclusion_text(vec![cost(atomics::L2, 4.0), cost(atomics::INCREMENT, 20.0)]);
        assert!(dear.contains("as dear as it was"), "{dear}");
    }

    #[test]
    fn requests_without_answers_are_told_beside_the_times_of_the_others() {
        let at = |path: RxPath, column: &str, value| Row::new(FLOOD, path.name(), column, "", vec![value]);
        let columns = |path, lost| {
            let all = [
                ("grace longest, ms", 164.0),
                ("grown by at most, MiB", 0.5),
                ("neighbours at most", 257.0),
                ("answer p99, ms", 0.33),
                ("unanswered, %", lost),
            ];
            all.map(|(column, value)| at(path, column, value)).to_vec()
        };
        let said =
            conclusion_text([columns(RxPath::Softirqs, 47.6), columns(RxPath::XdpThreaded, 0.0)].concat());
        assert!(
            said.contains("take 0.3300 ms or less, 47.6 % of its requests get none; with lane/xdp"),
            "{said}"
        );
        assert!(
            said.ends_with("0.5000 MiB: 99 % of the answers to a regular client take 0.3300 ms or less."),
            "{said}"
        );
    }

    #[test]
    fn writes_are_compared_as_shares() {
        let at = |column, value| Row::new(TABLE_3_WRITES, descriptor::WRITES, column, "s", vec![value]);
        let said = conclusion_text(vec![at(descriptor::FGET_LIGHT, 0.2), at(descriptor::FGET, 0.23)]);
        assert!(said.contains("dearer by +15.0 % (what fget_light spared in the paper: +9.5 %)"), "{said}");
    }

    #[test]
    fn starvation_is_told_beside_the_papers() {
        let at =
            |path: RxPath, column: &str, value| Row::new(FIGURE_9, path.name(), column, "ms", vec![value]);
        let rows = vec![
            at(RxPath::Softirqs, starvation::LONGEST_GAP, 42.0),
            at(RxPath::Softirqs, "stood still, %", 80.0),
            at(RxPath::XdpThreaded, starvation::LONGEST_GAP, 3.5),
            at(RxPath::XdpThreaded, "stood still, %", 10.0),
        ];
        let said = conclusion_text(rows);
        assert!(said.contains(
            "stands still for 42.0 ms at most, 80.0 % of the time in all (paper: more than 5000 ms)"
        ));
        assert!(said.contains("threaded NAPI, lane/xdp: 3.50 ms, 10.0 %"), "{said}");
    }
}
