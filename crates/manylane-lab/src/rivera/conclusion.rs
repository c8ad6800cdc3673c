//! The conclusion from figures and tables, by rules.

use super::{CALLERS, CONTENTIONS, FIGURE_2, FIGURE_2_CPU, FIGURE_4, TABLE_1, TABLE_2};
use crate::Rows;
use crate::phrases::{duration_phrase, min_by_value, ratio, times_phrase};
use crate::table::format_number;

/// The conclusion.
pub(crate) fn conclude(rows: &Rows<'_>) -> Vec<String> {
    [
        shared(rows),
        pipe(rows),
        best(rows),
        cost(rows),
        queues(rows),
        lost(rows),
        locks(rows),
        socket_lock(rows),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Effect of more readers on one shared socket.
fn shared(rows: &Rows<'_>) -> Option<String> {
    let line = "socket/recvfrom";
    let more = ratio(rows.value(FIGURE_2, line, "8"), rows.value(FIGURE_2, line, "1"))?;
    let verdict = match more {
        _ if more > 1.05 => "adding readers makes it slower here, too",
        _ if more < 0.95 => "unlike in the paper, adding readers makes it faster here",
        _ => {
            "adding readers does not make it faster, as in the paper; unlike there, it does not make it slower"
        }
    };
    Some(format!(
        "With 8 readers the shared socket takes {} the time of one reader: {verdict}{}.",
        times_prefix(more),
        rows.overlap_note(FIGURE_2, (line, "8"), (line, "1"))
    ))
}

/// `1.9 times`, or `as much as` before a time.
fn times_prefix(ratio: f64) -> String {
    if (0.95..=1.05).contains(&ratio) { "about".into() } else { times_phrase(ratio) }
}

fn pipe(rows: &Rows<'_>) -> Option<String> {
    let more = ratio(rows.value(FIGURE_2, "FIFO", "8"), rows.value(FIGURE_2, "FIFO", "1"))?;
    let doubt = rows.overlap_note(FIGURE_2, ("FIFO", "8"), ("FIFO", "1"));
    Some(format!("The FIFO takes {} with 8 readers{doubt}.", duration_phrase(more)))
}

/// The fastest way with eight readers, against the shared socket.
fn best(rows: &Rows<'_>) -> Option<String> {
    let shared = rows.value(FIGURE_2, "socket/recvfrom", "8")?;
    // The testbed has another sender, so that its times are not comparable.
    let others = rows
        .column(FIGURE_2, "8")
        .filter(|(line, _)| !matches!(*line, "FIFO" | "socket/recvfrom" | "lane/xdp"));
    let (line, value) = min_by_value(others)?;
    Some(if value < shared {
        format!(
            "Over loopback {line} is the fastest with 8 readers: the shared socket takes {}{}.",
            duration_phrase(shared / value),
            rows.overlap_note(FIGURE_2, (line, "8"), ("socket/recvfrom", "8"))
        )
    } else {
        format!("Over loopback nothing is faster with 8 readers than the shared socket; {line} comes next.")
    })
}

/// Processor time with eight readers.
fn cost(rows: &Rows<'_>) -> Option<String> {
    let shared = rows.value(FIGURE_2_CPU, "socket/recvfrom", "8")?;
    let lanes: Vec<String> = ["lane/mmsg", "lane/uring", "lane/xdp"]
        .into_iter()
        .filter_map(|line| Some(format!("{line} {}", format_number(rows.value(FIGURE_2_CPU, line, "8")?))))
        .collect();
    (!lanes.is_empty()).then(|| {
        format!(
            "A unit costs 8 readers {} ns of processor time on the shared socket; with lanes: {} ns (of the reading threads; what softirqs do before is in none of them).",
            format_number(shared),
            lanes.join(", ")
        )
    })
}

/// Figure 4.
fn queues(rows: &Rows<'_>) -> Option<String> {
    let one = rows.value(FIGURE_4, "socket/recvfrom", "2")?;
    let lanes = rows.value(FIGURE_4, "lane/mmsg, round robin", "2")?;
    let verdict = match lanes / one {
        less if less < 0.95 => {
            format!("{} as one socket: two queues are faster, as in the paper", duration_phrase(less))
        }
        more if more > 1.05 => {
            format!("{} as one socket: unlike in the paper, two queues are not faster", duration_phrase(more))
        }
        _ => "as long as one socket: two queues gain nothing here, unlike in the paper".into(),
    };
    let doubt = rows.overlap_note(FIGURE_4, ("socket/recvfrom", "2"), ("lane/mmsg, round robin", "2"));
    Some(format!("From one source to two readers, lanes filled round robin take {verdict}{doubt}."))
}

/// Lost units. With losses, a time is not the time of all units.
fn lost(rows: &Rows<'_>) -> Option<String> {
    let mut told = Vec::new();
    for row in rows.table(FIGURE_2).chain(rows.table(FIGURE_4)) {
        let count = |name: &str| row.counts.get(name).copied().unwrap_or(0);
        let lost = count("sent").saturating_sub(count("delivered"));
        if lost > 0 {
            told.push(format!("{lost} of {} ({}, {} readers)", count("sent"), row.line, row.column));
        }
    }
    (!told.is_empty())
        .then(|| format!("Units were lost, so that these times are not of all units: {}.", told.join(", ")))
}

/// Waits for the locks of Tables I and II, and for any lock, per million units. For the paper's
/// numbers, each thread is assumed to have read 500,000.
fn locks(rows: &Rows<'_>) -> Option<String> {
    let any = |line: &str| rows.cell(CALLERS, &format!("{line}, 8: all locks"), "per million");
    let shared = any("socket/recvfrom")?;
    let units = *shared.counts.get("delivered")? as f64;
    let two = rows.value(TABLE_1, "8", CONTENTIONS)? + rows.value(TABLE_2, "8", CONTENTIONS)?;
    let paper = rows.paper_value(TABLE_1, "8", CONTENTIONS)? + rows.paper_value(TABLE_2, "8", CONTENTIONS)?;
    let mut text = format!(
        "With 8 readers of a shared socket threads wait for the paper's two locks {} times in a million units (there: {}, if each of its 8 threads read 500,000), for any lock of the kernel {} times",
        format_number(ratio(Some(two * 1e6), Some(units))?),
        format_number(paper / 4.0),
        format_number(shared.value?)
    );
    let lanes: Vec<String> = ["lane/mmsg", "lane/uring", "lane/xdp"]
        .into_iter()
        .filter_map(|line| Some(format!("{line} {}", format_number(any(line)?.value?))))
        .collect();
    if !lanes.is_empty() {
        text += &format!("; with lanes for any lock: {}", lanes.join(", "));
    }
    Some(text + ".")
}

/// Table II: the lock that was the paper's bottleneck.
fn socket_lock(rows: &Rows<'_>) -> Option<String> {
    let ours = rows.value(TABLE_2, "8", CONTENTIONS)?;
    let paper = rows.paper_value(TABLE_2, "8", CONTENTIONS)?;
    Some(if ours == 0.0 {
        format!(
            "Nobody waited for the lock of the whole socket, which was the paper's bottleneck ({} contentions): receiving from UDP does not take it any more.",
            format_number(paper)
        )
    } else {
        format!(
            "For the lock of the whole socket threads waited {} times (paper: {}).",
            format_number(ours),
            format_number(paper)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Paper, Row};

    fn conclusion_text(cells: &[(&str, &str, &str, f64)]) -> Vec<String> {
        let rows: Vec<Row> = cells
            .iter()
            .map(|&(table, line, column, value)| Row::new(table, line, column, "s", vec![value]))
            .collect();
        conclude(&Rows::for_paper(Paper::Rivera, &rows))
    }

    #[test]
    fn nothing_is_said_of_what_was_not_measured() {
        assert_eq!(conclusion_text(&[]), Vec::<String>::new());
        assert_eq!(conclusion_text(&[(FIGURE_2, "socket/recvfrom", "1", 2.0)]), Vec::<String>::new());
    }

    #[test]
    fn the_verdict_follows_the_figures() {
        let with = |eight: f64| {
            conclusion_text(&[
                (FIGURE_2, "socket/recvfrom", "1", 2.0),
                (FIGURE_2, "socket/recvfrom", "8", eight),
            ])
            .join(" ")
        };
        assert!(
            with(3.8).contains("takes 1.90 times the time of one reader: adding readers makes it slower")
        );
        assert!(with(1.0).contains("0.5000 times the time of one reader: unlike in the paper"));
        assert!(with(2.05).contains("about the time of one reader: adding readers does not make it faster"));
    }

    #[test]
    fn a_difference_that_may_be_chance_is_said_to_be_so() {
        let with = |one: [f64; 2], eight: [f64; 2]| {
            let row = |column: &str, samples: [f64; 2]| {
                Row::new(FIGURE_2, "socket/recvfrom", column, "s", samples.to_vec())
            };
            let rows = [row("1", one), row("8", eight)];
            conclude(&Rows::for_paper(Paper::Rivera, &rows)).join(" ")
        };
        assert!(
            with([0.14, 0.29], [0.29, 0.33]).contains("slower here, too (rounds overlap: may be chance).")
        );
        assert!(with([0.14, 0.15], [0.29, 0.33]).contains("slower here, too."));
    }

    #[test]
    fn what_was_lost_is_told() {
        let row = Row::new(FIGURE_2, "lane/xdp", "4", "s", vec![1.0])
            .with_counts(&[("sent", 100), ("delivered", 97)]);
        let said = conclude(&Rows::for_paper(Paper::Rivera, &[row])).join(" ");
        assert!(said.contains("3 of 100 (lane/xdp, 4 readers)"), "{said}");
    }

    #[test]
    fn two_queues_may_win_or_lose() {
        let with = |lanes: f64| {
            let cells =
                [(FIGURE_4, "socket/recvfrom", "2", 1.0), (FIGURE_4, "lane/mmsg, round robin", "2", lanes)];
            conclusion_text(&cells).join(" ")
        };
        assert!(
            with(0.6).contains("0.6000 times as long as one socket: two queues are faster, as in the paper")
        );
        assert!(with(1.4).contains("unlike in the paper, two queues are not faster"));
        assert!(with(1.0).contains("gain nothing here"));
    }

    #[test]
    fn waits_are_compared_lock_by_lock_and_unit_by_unit() {
        let cell = |table, line, value| Row::new(table, line, CONTENTIONS, "", vec![value]);
        let mut rows = vec![cell(TABLE_1, "8", 482.0), cell(TABLE_2, "8", 18.0)];
        (rows[0].printed, rows[1].printed) = (Some(1479.0), Some(4281.0));
        let all = |line: &str, value| {
            let line = format!("{line}, 8: all locks");
            Row::new(CALLERS, &line, "per million", "", vec![value]).with_counts(&[("delivered", 25_000)])
        };
        rows.extend([all("socket/recvfrom", 521_120.0), all("lane/mmsg", 121_600.0)]);
        let said = conclude(&Rows::for_paper(Paper::Rivera, &rows)).join(" ");
        assert!(said.contains("two locks 20000 times in a million units (there: 1440"), "{said}");
        assert!(
            said.contains(
                "any lock of the kernel 521,120 times; with lanes for any lock: lane/mmsg 121,600."
            ),
            "{said}"
        );
    }

    #[test]
    fn a_lock_that_nobody_waits_for_is_said_to_be_gone() {
        let mut rows = vec![Row::new(TABLE_2, "8", CONTENTIONS, "", vec![0.0])];
        rows[0].printed = Some(4281.0);
        let said = conclude(&Rows::for_paper(Paper::Rivera, &rows)).join(" ");
        assert!(said.contains("Nobody waited") && said.contains("(4281 contentions)"), "{said}");
        rows[0].value = Some(12.0);
        let said = conclude(&Rows::for_paper(Paper::Rivera, &rows)).join(" ");
        assert!(said.contains("waited 12.0 times (paper: 4281)"), "{said}");
    }
}
