//! The conclusion of a run in plain words. Every sentence is computed from the figures.

use crate::schema::{BENCH_ECHO, BenchRow, Sample};
use crate::stats::{Summary, mann_whitney, median};

/// Highest p-value of a difference that is reported as one.
const SIGNIFICANCE_LEVEL: f64 = 0.05;

/// The words for the figures of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Labels {
    /// The unit that is sent, in the plural.
    pub(crate) sent: &'static str,
    /// The unit of the cost.
    pub(crate) unit: &'static str,
    /// The verb for what a receiver does with it.
    pub(crate) verb: &'static str,
}

impl Labels {
    /// The words for documents of this schema.
    pub(crate) fn for_schema(schema: &str) -> Self {
        if schema == BENCH_ECHO {
            Self { sent: "Requests", unit: "answered request", verb: "answers" }
        } else {
            Self { sent: "Datagrams", unit: "datagram", verb: "delivers" }
        }
    }
}

/// The preferred baselines of a lane: a socket for each thread, as lanes have, or the rings of a
/// queue.
fn baselines_for(lane: &str) -> &'static [&'static str] {
    if lane == "lane/xdp" { &["xsk/raw"] } else { &["reuseport/recvmmsg", "reuseport/gro"] }
}

/// Sentences about the rows of one payload size.
pub(crate) fn conclude(rows: &[&BenchRow], words: Labels) -> Vec<String> {
    let mut said = Vec::new();
    let mut threads: Vec<usize> = rows.iter().map(|row| row.figures.threads).collect();
    threads.sort_unstable();
    threads.dedup();
    let ours: Vec<&BenchRow> = rows.iter().copied().filter(|row| is_lane(row)).collect();
    for &count in &threads {
        let among: Vec<&BenchRow> = rows.iter().copied().filter(|row| row.figures.threads == count).collect();
        for lane in among.iter().filter(|row| is_lane(row)) {
            said.extend(compare_to_baselines(lane, &among, words));
        }
    }
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&row.figures.receiver.as_str()) {
            names.push(&row.figures.receiver);
        }
    }
    for name in names {
        said.extend(thread_scaling(name, rows, words));
    }
    for row in rows.iter().filter(|row| row.goodput_at_double_pps.is_some()) {
        said.extend(overload(row, words));
    }
    if ours.is_empty() {
        said.push("No lanes were measured: these are baselines only.".into());
    }
    said
}

fn is_lane(row: &BenchRow) -> bool {
    row.figures.receiver.starts_with("lane/")
}

fn costs(row: &BenchRow) -> Vec<f64> {
    row.samples.iter().map(|sample: &Sample| sample.rx_cpu_ns).collect()
}

fn compare_to_baselines(lane: &BenchRow, among: &[&BenchRow], words: Labels) -> Option<String> {
    let cheapest = |names: &dyn Fn(&str) -> bool| {
        among
            .iter()
            .filter(|row| !is_lane(row) && names(&row.figures.receiver))
            .min_by(|a, b| a.figures.rx_cpu_ns.total_cmp(&b.figures.rx_cpu_ns))
            .copied()
    };
    let same = cheapest(&|name| baselines_for(&lane.figures.receiver).contains(&name))
        .or_else(|| cheapest(&|name| !name.starts_with("xsk/")))?;
    Some(format!(
        "{}: {} takes {:.0} ns of receiver CPU per {}, {}.{}",
        thread_count(lane.figures.threads),
        lane.figures.receiver,
        lane.figures.rx_cpu_ns,
        words.unit,
        compare(lane, same),
        [("socket/", "one shared socket"), ("reuseport/", "a kernel socket for each thread")]
            .into_iter()
            .filter_map(|(prefix, what)| Some((cheapest(&|name| name.starts_with(prefix))?, what)))
            .filter(|(other, _)| {
                let family = |name: &str| name.split('/').next().map(str::to_owned);
                family(&other.figures.receiver) != family(&same.figures.receiver)
            })
            .map(|(other, what)| format!(" Against {what} it is {}.", compare(lane, other)))
            .collect::<String>()
    ))
}

/// Compares `lane` with `other`, and says whether the difference may be chance.
fn compare(lane: &BenchRow, other: &BenchRow) -> String {
    let ratio = lane.figures.rx_cpu_ns / other.figures.rx_cpu_ns;
    let base = format!("{} ({:.0} ns)", other.figures.receiver, other.figures.rx_cpu_ns);
    let p = mann_whitney(&costs(lane), &costs(other));
    if p > SIGNIFICANCE_LEVEL {
        format!("{ratio:.2} of {base}, which these samples cannot tell from no difference (p = {p:.2})")
    } else if ratio <= 1.0 {
        format!("{ratio:.2} of {base}: {:.0} % less (p = {p:.3})", (1.0 - ratio) * 100.0)
    } else {
        format!("{ratio:.2} of {base}: {:.0} % more (p = {p:.3})", (ratio - 1.0) * 100.0)
    }
}

fn thread_scaling(name: &str, rows: &[&BenchRow], words: Labels) -> Option<String> {
    let mine: Vec<&BenchRow> = rows.iter().copied().filter(|row| row.figures.receiver == name).collect();
    let fewest = mine.iter().min_by_key(|row| row.figures.threads)?;
    let most = mine.iter().max_by_key(|row| row.figures.threads)?;
    if fewest.figures.threads == most.figures.threads || fewest.figures.rx_cpu_ns <= 0.0 {
        return None;
    }
    let ratio = most.figures.rx_cpu_ns / fewest.figures.rx_cpu_ns;
    Some(format!(
        "From {} to {}, {name} goes from {:.0} to {:.0} ns per {}: {}.",
        fewest.figures.threads,
        thread_count(most.figures.threads),
        fewest.figures.rx_cpu_ns,
        most.figures.rx_cpu_ns,
        words.unit,
        if mann_whitney(&costs(fewest), &costs(most)) > SIGNIFICANCE_LEVEL {
            format!("{ratio:.2} times, no difference that these samples could show")
        } else {
            format!("{ratio:.2} times")
        }
    ))
}

fn overload(row: &BenchRow, words: Labels) -> Option<String> {
    let (best, offered, goodput) = (row.no_loss_pps?, row.offered_at_double_pps?, row.goodput_at_double_pps?);
    let kept = goodput / best;
    let verdict = if kept >= 0.9 {
        "it holds its rate under overload"
    } else if kept >= 0.5 {
        "it loses a part of its rate under overload"
    } else {
        "it collapses under overload (receive livelock)"
    };
    // A sender that is slower than the receiver proves nothing.
    if offered < best * 1.2 {
        return None;
    }
    Some(format!(
        "{} with {}: {:.0} k/s without loss; of {:.0} k/s it {} {:.0} k/s, {:.2} of its best: {verdict}.",
        row.figures.receiver,
        thread_count(row.figures.threads),
        best / 1e3,
        offered / 1e3,
        words.verb,
        goodput / 1e3,
        kept
    ))
}

fn thread_count(count: usize) -> String {
    if count == 1 { "1 thread".into() } else { format!("{count} threads") }
}

/// The spread of the rows' samples, and whether the machine was quiet enough to trust them.
pub(crate) fn quality(rows: &[&BenchRow]) -> String {
    let spreads = rows.iter().filter_map(|row| {
        let summary = Summary::from_samples(costs(row))?;
        (summary.median > 0.0).then(|| summary.iqr() / summary.median * 100.0)
    });
    let all: Vec<f64> = spreads.collect();
    let Some(summary) = Summary::from_samples(all.iter().copied()) else { return "No samples.".into() };
    let lossy = rows.iter().filter(|row| row.figures.loss > 0.001).count();
    let mut text = format!(
        "The middle half of a receiver's samples spreads over {:.1} % of their median as a rule, {:.1} % at most.",
        median(all.iter().copied()),
        summary.max
    );
    if summary.median > 15.0 {
        text += " That is a noisy machine: small differences mean nothing here.";
    }
    if lossy > 0 {
        text += &format!(
            " {lossy} of {} rows lost more than 0.1 % in their cost rounds: their cost is not comparable.",
            rows.len()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::BENCH_RX;

    fn row(receiver: &str, threads: usize, costs: &[f64]) -> BenchRow {
        let samples = costs.iter().enumerate().map(|(round, cost)| Sample {
            round,
            offered_pps: 1e5,
            delivered_pps: 1e5,
            loss: 0.0,
            rx_cpu_ns: *cost,
            total_cpu_ns: *cost * 3.0,
            sent: 1000,
            delivered: 1000,
            kernel_dropped: 0,
            taken: None,
        });
        BenchRow::from_samples(receiver, threads, threads, 10, samples.collect())
    }

    #[test]
    fn the_words_follow_the_figures() {
        let cheap = [400., 401., 402., 403., 404.];
        let dear = [800., 801., 802., 803., 804.];
        let (lane, base) = (row("lane/mmsg", 1, &cheap), row("reuseport/gro", 1, &dear));
        let said = conclude(&[&lane, &base], Labels::for_schema(BENCH_RX)).join(" ");
        assert!(said.contains("0.50 of reuseport/gro (802 ns): 50 % less"), "{said}");
        let (lane, base) = (row("lane/mmsg", 1, &dear), row("reuseport/gro", 1, &cheap));
        let said = conclude(&[&lane, &base], Labels::for_schema(BENCH_RX)).join(" ");
        assert!(said.contains("2.00 of reuseport/gro (402 ns): 100 % more"), "{said}");
        let said = conclude(
            &[&row("lane/mmsg", 1, &cheap), &row("reuseport/gro", 1, &cheap)],
            Labels::for_schema(BENCH_RX),
        )
        .join(" ");
        assert!(said.contains("cannot tell from no difference"), "{said}");
    }

    #[test]
    fn growth_and_collapse_are_named() {
        let few = row("socket/recvfrom", 1, &[600., 601., 602., 603., 604.]);
        let mut many = row("socket/recvfrom", 8, &[1200., 1201., 1202., 1203., 1204.]);
        many.no_loss_pps = Some(300_000.0);
        many.offered_at_double_pps = Some(600_000.0);
        many.goodput_at_double_pps = Some(30_000.0);
        let said = conclude(&[&few, &many], Labels::for_schema(BENCH_RX)).join(" ");
        assert!(said.contains("From 1 to 8 threads, socket/recvfrom goes from 602 to 1202"), "{said}");
        assert!(said.contains("collapses under overload"), "{said}");
        assert!(said.contains("baselines only"), "{said}");
        many.goodput_at_double_pps = Some(299_000.0);
        assert!(conclude(&[&many], Labels::for_schema(BENCH_RX)).join(" ").contains("holds its rate"));
        // The sender did not get far above: no sentence.
        many.offered_at_double_pps = Some(310_000.0);
        assert!(!conclude(&[&many], Labels::for_schema(BENCH_RX)).join(" ").contains("overload"));
    }

    #[test]
    fn of_answers_it_says_so() {
        let (lane, base) = (row("lane/xdp", 1, &[400.; 5]), row("xsk/raw", 1, &[800.; 5]));
        let said = conclude(&[&lane, &base], Labels::for_schema(BENCH_ECHO)).join(" ");
        assert!(said.contains("400 ns of receiver CPU per answered request, 0.50 of xsk/raw"), "{said}");
        assert!(!said.contains("per datagram"), "{said}");
    }

    #[test]
    fn noise_is_admitted() {
        assert!(quality(&[&row("lane/mmsg", 1, &[100., 200., 300., 400., 500.])]).contains("noisy"));
        assert!(!quality(&[&row("lane/mmsg", 1, &[100., 100., 101., 101., 101.])]).contains("noisy"));
        assert_eq!(quality(&[]), "No samples.");
    }
}
