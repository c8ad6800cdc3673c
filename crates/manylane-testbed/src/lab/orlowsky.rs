//! Orlowsky: message headers that the kernel remembers, so that no call copies them in. His table repeats four numbers, and his
//! experiment between two hosts was not made; both are here, with what needs no changed kernel: headers and buffers that are
//! registered with io_uring or built once.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Result;
use manylane::Steering;

use super::words::{as_long, least, ratio};
use super::{Part, Places, Plot, Row, Rows, Scale, Still, Table};
use crate::bench::batch::{self, By, Plan};
use crate::bench::{self, Options};
use crate::lab::table::short;
use crate::receiver::Work;
use crate::toil::Toil;

const LOCAL: &str = "local experiment";
const REAL: &str = "real-world experiment";

/// Bytes of a message, as in the paper.
const SIZES: [usize; 4] = [64, 256, 1024, 8192];
/// Messages that a call may take, the last as in the paper.
const MESSAGES: [usize; 3] = [1, 64, 1000];
/// What the paper has as well. `recvmmsg` takes no more than 1024 (UIO_MAXIOV).
const TOO_MANY: [usize; 3] = [10_000, 100_000, 1_000_000];
/// What a regular kernel does.
const REGULAR: &str = "socket/recvmmsg";
/// Seconds for the paper's 100 million messages, per nanosecond of one.
const HUNDRED_MILLION: f64 = 0.1;

pub(super) fn tables(_scale: &Scale) -> Vec<Table> {
    let table = |name, title: &str| Table { name, title: title.into(), plot: Some(Plot::Bars("receiver")) };
    vec![
        table(
            LOCAL,
            "Local experiment: seconds of processor time to receive 100 million messages that are there",
        ),
        table(REAL, "Real-world experiment: the same between two hosts of the testbed"),
    ]
}

/// A part for each round of each size.
pub(super) fn parts(scale: &Scale) -> Vec<Part> {
    let mut parts = Vec::new();
    for round in 1..=scale.rounds {
        for (name, table) in [("local", LOCAL), ("real-world", REAL)] {
            for size in SIZES {
                let id = format!("orlowsky/{name}/{size}-bytes/round-{round}");
                parts.push(Part::new(id, move |places, stop| Ok(rows(places, table, size, stop))));
            }
        }
    }
    parts
}

fn line(size: usize, messages: usize) -> String {
    format!("{size} bytes, {messages} a call")
}

/// One sample of each receiver, by messages per call.
fn rows(places: &mut Places, table: &str, size: usize, stop: &AtomicBool) -> Vec<Row> {
    let mut rows = Vec::new();
    for messages in MESSAGES {
        for by in By::ALL {
            if by.needs_device() && table == LOCAL {
                continue;
            }
            let (line, column) = (line(size, messages), by.name());
            rows.push(match sample(places, table, by, (size, messages), stop) {
                Ok((samples, counts)) => Row::new(table, &line, column, "s", samples).with(&counts),
                Err(err) => Row::cannot(table, &line, column, "s", &format!("{err:#}")),
            });
        }
    }
    for messages in TOO_MANY {
        let why = "recvmmsg takes no more than 1024 messages by one call (UIO_MAXIOV), whatever it is asked for: 1000 stand for all of them";
        rows.push(Row::cannot(table, &line(size, messages), REGULAR, "s", why));
    }
    rows
}

type Counted = (Vec<f64>, [(&'static str, u64); 2]);

fn sample(
    places: &mut Places,
    table: &str,
    by: By,
    (size, messages): (usize, usize),
    stop: &AtomicBool,
) -> Result<Counted> {
    let quick = places.scale.quick;
    let setup = match table {
        REAL => {
            anyhow::ensure!(size <= 1400, "a frame of the testbed carries no more than 1500 bytes");
            places.testbed()?
        }
        _ => places.loopback()?,
    };
    let options = Options {
        threads: vec![1],
        sizes: vec![size],
        receivers: Vec::new(),
        work: Work::Count,
        toil: Toil::default(),
        rounds: 1,
        duration: Duration::ZERO,
        pps: None,
        flows: 64,
        batch: 64,
        recv_buffer: bench::usual_recv_buffer(),
        linger: None,
        steering: Steering::Flow,
        quick,
        command: String::new(),
    };
    let plan = Plan { by: vec![by], messages: vec![messages], fills: if quick { 1 } else { 4 } };
    let run = batch::run(setup, &options, &plan, &mut Still(stop))?;
    let samples = run.rows.iter().flat_map(|row| &row.samples);
    let (mut seconds, mut sent, mut delivered) = (Vec::new(), 0, 0);
    for sample in samples {
        seconds.push(sample.rx_cpu_ns * HUNDRED_MILLION);
        sent += sample.sent;
        delivered += sample.delivered;
    }
    Ok((seconds, [("sent", sent), ("delivered", delivered)]))
}

pub(super) fn differs() -> Vec<String> {
    [
        "The paper's table has four pairs of numbers (87837 and 787, 78 and 5415, 778 and 7507 twice), the same for every size: placeholders, which are not repeated here. Its real-world section is empty.",
        "Instead of a changed kernel: socket/recvmmsg is what every regular kernel does, with headers built once in user space and copied in by each call; with io_uring (uring/plain, lane/uring) headers, buffers and the socket are registered once and nothing is copied in, which is what the paper's system call was for; uring/single submits each receive anew.",
        "The paper receives 1,000 to 1,000,000 messages by one call. recvmmsg takes no more than 1024 by one call (UIO_MAXIOV), whatever it is asked for, so that all but its 1,000 cannot be had; 1 and 64 stand here besides.",
        "What is measured is the processor time of the receiving thread while it empties queues that are full, scaled to the paper's 100 million messages; the paper's time includes the sender.",
        "8192 bytes do not fit a frame of the testbed.",
    ]
    .map(String::from)
    .to_vec()
}

pub(super) fn conclude(rows: &Rows<'_>) -> Vec<String> {
    let mut said = Vec::new();
    for (table, place) in [(LOCAL, "On one host"), (REAL, "Between two hosts")] {
        for messages in [1, 1000] {
            let at = |by: &str| rows.value(table, &line(64, messages), by);
            let Some(regular) = at(REGULAR) else { continue };
            let others = By::ALL.map(By::name).into_iter().filter(|by| *by != REGULAR);
            let others = others.filter_map(|by| Some((by, at(by)?)));
            let Some((best, seconds)) = least(others) else { continue };
            let verdict = if seconds < regular {
                format!(
                    "{best} is the fastest: {} s, the regular way takes {}",
                    short(seconds),
                    as_long(regular / seconds)
                )
            } else {
                format!("the regular way is the fastest, {best} next with {} s", short(seconds))
            };
            let line = line(64, messages);
            let verdict = verdict + rows.doubt(table, (&line, REGULAR), (&line, best));
            said.push(format!(
                "{place}, 100 million messages of 64 bytes cost the regular way {} s with {messages} a call; {verdict}.",
                short(regular)
            ));
        }
    }
    let gain =
        ratio(rows.value(LOCAL, &line(64, 1000), "uring/plain"), rows.value(LOCAL, &line(64, 1000), REGULAR));
    if let Some(gain) = gain {
        let line = line(64, 1000);
        said.push(format!(
            "What the paper hoped for, headers that are not copied in by every call, {} by itself with 1000 messages a call: uring/plain takes {} of the regular way's time{}.",
            if gain < 0.95 { "pays" } else { "does not pay" },
            short(gain),
            rows.doubt(LOCAL, (&line, REGULAR), (&line, "uring/plain"))
        ));
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::Paper;

    fn said(cells: &[(&str, usize, &str, f64)]) -> String {
        let row = |&(table, messages, by, value): &(&str, usize, &str, f64)| Row {
            paper: Paper::Orlowsky,
            ..Row::new(table, &line(64, messages), by, "s", vec![value])
        };
        let rows: Vec<Row> = cells.iter().map(row).collect();
        conclude(&Rows::of(Paper::Orlowsky, &rows)).join(" ")
    }

    #[test]
    fn the_fastest_way_is_found_by_the_figures() {
        assert_eq!(said(&[]), "");
        let lanes = said(&[
            (LOCAL, 1000, REGULAR, 60.0),
            (LOCAL, 1000, "lane/mmsg", 30.0),
            (LOCAL, 1000, "uring/plain", 59.5),
        ]);
        assert!(
            lanes.contains("lane/mmsg is the fastest: 30.0 s, the regular way takes 2.00 times as long"),
            "{lanes}"
        );
        assert!(lanes.contains("does not pay by itself"), "{lanes}");
        assert!(!lanes.contains("may be chance"), "each has one sample, and they are apart: {lanes}");
        let same = said(&[(LOCAL, 1000, REGULAR, 60.0), (LOCAL, 1000, "uring/plain", 60.0)]);
        assert_eq!(same.matches("(rounds overlap: may be chance)").count(), 2, "{same}");
        let regular = said(&[(REAL, 1, REGULAR, 60.0), (REAL, 1, "uring/plain", 70.0)]);
        assert!(
            regular.contains("Between two hosts") && regular.contains("the regular way is the fastest"),
            "{regular}"
        );
    }

    #[test]
    fn loopback_messages_are_all_taken() {
        let scale = Scale { rounds: 1, ..Scale::quick() };
        let mut places = Places::new(scale);
        let rows = rows(&mut places, LOCAL, 64, &AtomicBool::new(false));
        let here = By::ALL.iter().filter(|by| !by.needs_device()).count();
        assert_eq!(rows.len(), MESSAGES.len() * here + TOO_MANY.len());
        assert!(rows.iter().all(|row| row.value.is_some() != row.why_not.is_some()));
        let taken = rows.iter().filter(|row| row.value.is_some());
        let taken: Vec<&Row> =
            taken.filter(|row| row.column == REGULAR || row.column == "lane/mmsg").collect();
        assert_eq!(taken.len(), 2 * MESSAGES.len());
        for row in taken {
            assert_eq!(row.counts["sent"], 2048, "{row:?}");
            assert_eq!(row.counts["delivered"], 2048, "{row:?}");
        }
    }
}
