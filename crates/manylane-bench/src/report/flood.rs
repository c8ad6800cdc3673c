//! The conclusion of a run of `bench flood`: sentences computed from its samples.

mod page;

pub use self::page::html;
use crate::schema::{FloodPauses, FloodRow};
use crate::stats::{Summary, mann_whitney};

/// Highest p-value of a difference that is reported as one.
const SIGNIFICANCE_LEVEL: f64 = 0.05;
/// Required share of answered requests of regular clients.
const REPLY_RATIO_MIN: f64 = 0.99;
/// Longest acceptable pause of a program, in milliseconds.
const STARVATION_MS_MAX: f64 = 10.0;

/// The sentences, in the order of the parts.
#[must_use]
pub fn conclusions(rows: &[FloodRow]) -> Vec<String> {
    let mut said = Vec::new();
    said.extend(clients(rows));
    said.extend(sources(rows));
    said.extend(program(rows));
    said
}

fn find_row<'a>(rows: &'a [FloodRow], part: &str, variant: &str) -> Option<&'a FloodRow> {
    rows.iter().find(|row| row.part == part && row.variant == variant)
}

/// Median, lowest and highest of the rounds.
fn format_spread(samples: impl Iterator<Item = f64>, digits: usize) -> String {
    let Some(all) = Summary::from_samples(samples) else { return "–".into() };
    format!("{:.digits$} ({:.digits$} to {:.digits$})", all.median, all.min, all.max)
}

fn clients(rows: &[FloodRow]) -> Option<String> {
    let [without, with] = ["no-limit", "limit"].map(|variant| find_row(rows, "clients", variant));
    let (without, with) = (without?, with?);
    let shares = |row: &FloodRow| -> Vec<f64> {
        row.samples.iter().filter_map(|seen| seen.clients).map(|clients| clients.share()).collect()
    };
    let percent = |row: &FloodRow| format_spread(shares(row).into_iter().map(|share| 100.0 * share), 1);
    let kept = shares(with).iter().filter(|share| **share >= REPLY_RATIO_MIN).count();
    Some(format!(
        "Beside a flood of {:.0} per second, {} % of the requests of regular clients are answered without a limit, and {} % \
         with it: at least 99 % in {kept} of {} rounds.",
        without.figures.offered_pps,
        percent(without),
        percent(with),
        with.samples.len()
    ))
}

fn sources(rows: &[FloodRow]) -> Vec<String> {
    let [empty, full] = ["one-source", "new-sources"].map(|variant| find_row(rows, "sources", variant));
    let (Some(empty), Some(full)) = (empty, full) else { return Vec::new() };
    let memory = |row: &FloodRow| -> (u64, usize) {
        let all = row.samples.iter().filter_map(|seen| seen.memory.as_ref());
        all.fold((0, 0), |(sources, seconds), seen| {
            (sources + seen.new_sources, seconds + seen.rss_kib.len())
        })
    };
    let (met, seconds) = memory(full);
    let grown = full.grown_kib.unwrap_or(0);
    let mut said = vec![format!(
        "{met} new sources in {seconds} s: the process had {grown} KiB more at the most than after the first second of them."
    )];
    for (who, what) in [("lane", "The lane"), ("observer", "A thread beside it that sleeps 100 µs at a time")]
    {
        let [many, few] = [full, empty].map(|row| rates(row, who));
        if many.is_empty() || few.is_empty() {
            continue;
        }
        let longest = |row: &FloodRow| format_spread(row.pauses(who).map(|pauses| pauses.longest_ms), 1);
        said.push(format!(
            "{what} pauses for more than 1 ms {} times a second with full tables, and {} times with empty ones: {}. The longest \
             pause of a round is {} ms and {} ms.",
            format_spread(many.iter().copied(), 1),
            format_spread(few.iter().copied(), 1),
            significance(&many, &few),
            longest(full),
            longest(empty)
        ));
    }
    let stolen = |row: &FloodRow| {
        format_spread(row.pauses("lane").map(|seen| seen.steal_ms / seen.seconds.max(1e-9)), 1)
    };
    said.push(format!(
        "Meanwhile the hypervisor took the lane's processor away for {} ms in a second with full tables, and for {} ms with empty ones.",
        stolen(full),
        stolen(empty)
    ));
    said
}

fn rates(row: &FloodRow, who: &str) -> Vec<f64> {
    row.pauses(who).map(FloodPauses::over_1ms_per_second).collect()
}

/// Compares the counts in `many` with those in `few`, as far as the rounds allow.
fn significance(many: &[f64], few: &[f64]) -> String {
    let p = mann_whitney(many, few);
    let middle =
        |all: &[f64]| Summary::from_samples(all.iter().copied()).map_or(0.0, |summary| summary.median);
    let (many_rounds, more) = (many.len(), middle(many) > middle(few));
    match (p < SIGNIFICANCE_LEVEL, more) {
        (true, true) => format!("more with full tables (p = {p:.3})"),
        (true, false) => format!("fewer with full tables (p = {p:.3})"),
        (false, _) => format!("no difference that {many_rounds} rounds could tell from chance (p = {p:.2})"),
    }
}

fn program(rows: &[FloodRow]) -> Vec<String> {
    let mut said = Vec::new();
    for variant in ["no-flood", "busy-thread", "kernel-sockets", "no-limit", "limit"] {
        let Some(row) = find_row(rows, "program", variant) else { continue };
        let all: Vec<&FloodPauses> = row.pauses("program").collect();
        let over = |value: fn(&FloodPauses) -> f64| {
            all.iter().filter(|seen| value(seen) > STARVATION_MS_MAX).count()
        };
        let unstolen = |seen: &FloodPauses| seen.longest_unstolen_ms.unwrap_or(seen.longest_ms);
        let of_lane = |seen: &FloodPauses| seen.apart.iter().map(|gap| gap.lane_ms).fold(0.0, f64::max);
        let of_lane: Vec<f64> = all.iter().map(|seen| of_lane(seen)).collect();
        let own = match of_lane.iter().any(|ms| *ms > 0.0) {
            true => {
                format!(
                    "; of one pause, the lane itself had {} ms at most",
                    format_spread(of_lane.into_iter(), 1)
                )
            }
            false => String::new(),
        };
        said.push(format!(
            "{variant}: a program on the lane's processor is kept from running for {} ms at the longest, over 10 ms in {} of {} rounds; \
             without what the hypervisor took while it ran, for {} ms, over 10 ms in {} rounds{own}.",
            format_spread(all.iter().map(|seen| seen.longest_ms), 1),
            over(|seen| seen.longest_ms),
            all.len(),
            format_spread(all.iter().map(|seen| unstolen(seen)), 1),
            over(unstolen)
        ));
    }
    if let Some((how, p)) = compare_longest(rows, "program", ["limit", "no-flood"]) {
        said.push(format!(
            "With the limit, that is {how} what the machine does without a flood (p = {p:.2})."
        ));
    }
    said.extend(sender_cpu_conclusions(rows));
    said
}

/// A program that shares its processor with the flood generator.
const SENDER_CPU_PROGRAM: &str = "program beside the sender";

fn sender_cpu_conclusions(rows: &[FloodRow]) -> Vec<String> {
    let mut said = Vec::new();
    for variant in ["busy-thread", "kernel-sockets", "no-limit", "limit"] {
        let Some(row) = find_row(rows, "program", variant) else { continue };
        let apart: Vec<f64> =
            row.pauses(SENDER_CPU_PROGRAM).filter_map(|seen| seen.longest_apart_ms).collect();
        if apart.is_empty() {
            continue;
        }
        let whose = if variant == "busy-thread" { "a thread that only spins" } else { "the sender" };
        said.push(format!(
            "{variant}: on the sender's processor, which {whose} wants all of, it is kept for {} ms at the longest; without the turns of \
             that thread and what the hypervisor took, for {} ms, over 10 ms in {} of {} rounds.",
            format_spread(row.pauses(SENDER_CPU_PROGRAM).map(|seen| seen.longest_ms), 1),
            format_spread(apart.iter().copied(), 1),
            apart.iter().filter(|ms| **ms > STARVATION_MS_MAX).count(),
            apart.len()
        ));
    }
    if let Some((how, p)) = compare_longest(rows, SENDER_CPU_PROGRAM, ["limit", "busy-thread"]) {
        said.push(format!(
            "There, with the limit, the longest is {how} what a thread does that takes turns with it and makes no flood (p = {p:.2})."
        ));
    }
    said
}

/// Compares the longest pauses of `who` in the first variant with those in the second, as far as
/// the rounds allow.
fn compare_longest(rows: &[FloodRow], who: &str, variants: [&str; 2]) -> Option<(&'static str, f64)> {
    let [one, other] = variants.map(|variant| {
        let row = find_row(rows, "program", variant)?;
        let longest: Vec<f64> = row.pauses(who).map(|seen| seen.longest_ms).collect();
        (!longest.is_empty()).then_some(longest)
    });
    let (one, other) = (one?, other?);
    let p = mann_whitney(&one, &other);
    let middle =
        |all: &[f64]| Summary::from_samples(all.iter().copied()).map_or(0.0, |summary| summary.median);
    let how = match (p < SIGNIFICANCE_LEVEL, middle(&one) > middle(&other)) {
        (true, true) => "longer than",
        (true, false) => "shorter than",
        (false, _) => "not to be told from",
    };
    Some((how, p))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{FloodClients, FloodGap, FloodMemory, FloodSample, Sample};

    pub(super) fn sample(round: usize) -> FloodSample {
        let sample = Sample {
            round,
            offered_pps: 600_000.0,
            delivered_pps: 1000.0,
            loss: 0.9,
            rx_cpu_ns: 1.0,
            total_cpu_ns: 2.0,
            sent: 900_000,
            delivered: 1500,
            kernel_dropped: 0,
            taken: None,
        };
        FloodSample { sample, limited: 0, xsk_dropped: 0, clients: None, memory: None, pauses: Vec::new() }
    }

    fn row(part: &str, variant: &str, change: impl Fn(usize, &mut FloodSample)) -> FloodRow {
        let samples = (0..5).map(|round| {
            let mut sample = sample(round);
            change(round, &mut sample);
            sample
        });
        FloodRow::from_samples(part, variant, "lane/xdp", 32, samples.collect())
    }

    fn pauses(who: &str, over: u64, longest: f64, unstolen: f64) -> FloodPauses {
        FloodPauses {
            who: who.into(),
            seconds: 10.0,
            longest_ms: longest,
            longest_unstolen_ms: Some(unstolen),
            over_1ms: over,
            ..FloodPauses::default()
        }
    }

    #[test]
    fn answers_are_told_with_how_often_they_were_enough() {
        let asked = |answered: u64| FloodClients { asked: 1000, answered, ..FloodClients::default() };
        let rows = [
            row("clients", "no-limit", |round, seen| {
                seen.clients = Some(asked(700 + 10 * round as u64));
            }),
            row("clients", "limit", |round, seen| {
                seen.clients = Some(asked(1000 - 11 * u64::from(round == 3)));
            }),
        ];
        let said = conclusions(&rows);
        assert_eq!(said.len(), 1);
        assert!(said[0].contains("72.0 (70.0 to 74.0) % of the requests"), "{said:?}");
        assert!(
            said[0].contains("100.0 (98.9 to 100.0) % with it: at least 99 % in 4 of 5 rounds"),
            "{said:?}"
        );
        assert_eq!(rows[1].answered, Some(1.0));
    }

    /// Pauses of a lane with full tables, with this many more in each round than with empty ones.
    fn sources_conclusions(more: u64) -> Vec<String> {
        let load = |variant, more: u64| {
            row("sources", variant, move |round, seen| {
                seen.pauses = vec![pauses("lane", 20 + round as u64 + more, 9.0, 9.0)];
                let rss_kib = vec![50_000 + 3 * round as u64, 50_000];
                seen.memory = Some(FloodMemory { new_sources: 1_000_000, rss_kib, slab_kib: vec![1, 1] });
            })
        };
        conclusions(&[load("one-source", 0), load("new-sources", more)])
    }

    #[test]
    fn pauses_with_full_tables_are_held_against_those_with_empty_ones() {
        let same = sources_conclusions(0);
        assert!(same[0].starts_with("5000000 new sources in 10 s: the process had 12 KiB more"), "{same:?}");
        assert!(same[1].contains("no difference that 5 rounds could tell from chance"), "{same:?}");
        let more = sources_conclusions(10);
        assert!(
            more[1].contains("3.2 (3.0 to 3.4) times a second") && more[1].contains("more with full"),
            "{more:?}"
        );
    }

    #[test]
    fn what_the_hypervisor_took_is_told_beside_and_hides_nothing() {
        let program = |variant, longest: f64, unstolen: f64| {
            row("program", variant, move |round, seen| {
                let more = round as f64;
                seen.pauses = vec![
                    pauses("program", 1, longest + more, unstolen + more),
                    pauses("program beside the sender", 1, 99.0, 99.0),
                ];
            })
        };
        let said = conclusions(&[program("no-flood", 8.0, 2.0), program("limit", 20.0, 3.0)]);
        assert!(
            said[0].contains("10.0 (8.0 to 12.0) ms at the longest, over 10 ms in 2 of 5 rounds"),
            "{said:?}"
        );
        assert!(
            said[1].contains("over 10 ms in 5 of 5 rounds")
                && said[1].contains("for 5.0 (3.0 to 7.0) ms, over 10 ms in 0 rounds"),
            "{said:?}"
        );
        assert!(said[2].contains("longer than what the machine does"), "{said:?}");
        assert_eq!(said.len(), 3, "nothing was told apart beside the sender");
    }

    #[test]
    fn what_the_lane_itself_had_is_told_where_it_had_any() {
        let program = |variant, lane_ms: f64| {
            row("program", variant, move |round, seen| {
                let gap = |ms| FloodGap { ms: 9.0, waited_ms: 9.0, lane_ms: ms, ..FloodGap::default() };
                let apart = vec![gap(lane_ms * round as f64), gap(0.0)];
                seen.pauses = vec![FloodPauses { apart, ..pauses("program", 1, 9.0, 9.0) }];
            })
        };
        let said = conclusions(&[program("no-flood", 0.0), program("limit", 0.5)]);
        assert!(!said[0].contains("itself"), "{said:?}");
        assert!(
            said[1].contains("in 0 rounds; of one pause, the lane itself had 1.0 (0.0 to 2.0) ms at most."),
            "{said:?}"
        );
    }

    #[test]
    fn what_the_sender_had_is_told_apart_from_the_flood() {
        let beside = |variant, longest: f64, apart: f64| {
            row("program", variant, move |round, seen| {
                let more = round as f64;
                let pauses = pauses(SENDER_CPU_PROGRAM, 1, longest + more, longest + more);
                seen.pauses = vec![FloodPauses { longest_apart_ms: Some(apart + more), ..pauses }];
            })
        };
        let said = conclusions(&[beside("busy-thread", 8.0, 0.2), beside("limit", 8.0, 7.0)]);
        let said: Vec<&String> =
            said.iter().filter(|said| said.contains("sender's") || said.contains("There,")).collect();
        assert!(
            said[0].contains("a thread that only spins wants all of")
                && said[0].contains("kept for 10.0 (8.0 to 12.0) ms"),
            "{said:?}"
        );
        assert!(said[1].contains("for 9.0 (7.0 to 11.0) ms, over 10 ms in 1 of 5 rounds"), "{said:?}");
        assert!(said[2].contains("not to be told from what a thread does that takes turns"), "{said:?}");
    }
}
