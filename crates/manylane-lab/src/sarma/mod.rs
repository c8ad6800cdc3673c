//! Sarma and McKenney: cost of atomic operations, locks and references in hot paths, and the
//! effect of datagram floods on deferred freeing and on user programs.
//!
//! | module | reproduces |
//! |---|---|
//! | `atomics` | Table 1: the cost of operations |
//! | `hot_path` | Table 2's question: locks that a hot path waits for |
//! | `descriptor` | Table 3's question: the cost of finding a file by its descriptor |
//! | `flood` | figures 7 and 8: a flood from random sources |
//! | `starvation` | figure 9: a user program under a flood |

mod atomics;
mod descriptor;
mod flood;
mod hot_path;
mod starvation;

use self::atomics::{COST, TABLE_1};
use self::descriptor::{TABLE_3, TABLE_3_WRITES};
use self::flood::{FIGURE_7, FIGURE_8, FLOOD};
use self::hot_path::TABLE_2;
use self::starvation::FIGURE_9;
use crate::paper::PaperValue;
use crate::paper_table::{Baseline, Plot, Table};
use crate::part::Part;
use crate::settings::Scale;

pub(super) fn tables() -> Vec<Table> {
    let stretch = Some(Plot::Lines("tenths of the flood"));
    let idle = Baseline::Line(flood::RxPath::Idle.name());
    vec![
        Table::new(TABLE_1, "Table 1: cost of operations, ns", Some(Plot::Bars("operation")))
            .compared_with(Baseline::Line(atomics::L2)),
        Table::new(
            TABLE_2,
            "Table 2: locks in a hot path. Paper: locks taken for a write of 4 KiB (ext3). Here: waits for locks per million datagrams",
            None,
        ),
        Table::new(
            TABLE_3,
            "Table 3: cost of looking up a file by its descriptor, ns per call or request",
            Some(Plot::Bars("table of descriptors")),
        )
        .compared_with(Baseline::Column(descriptor::OWN_TABLE)),
        Table::new(
            TABLE_3_WRITES,
            "Table 3: seconds of CPU time for a million writes of one byte. Paper: with and without fget_light(), SMP",
            None,
        )
        .compared_with(Baseline::Column(descriptor::FGET_LIGHT)),
        Table::new(
            FIGURE_7,
            "Figure 7: longest RCU grace period in each tenth of the flood, ms",
            stretch,
        ),
        Table::new(FIGURE_8, "Figure 8: network softirqs per 4 ms in each tenth of the flood", stretch),
        Table::new(FLOOD, "Figures 7 and 8: memory and latency during the flood", None).compared_with(idle),
        Table::new(FIGURE_9, "Figure 9: pauses of a user program under a flood, ms", None).compared_with(idle),
    ]
}

pub(super) fn parts(scale: &Scale) -> Vec<Part> {
    let mut parts = Vec::new();
    for round in 1..=scale.rounds {
        parts.push(Part::new(format!("sarma/table1/round-{round}"), |places, stop| {
            atomics::rows(&places.scale, stop)
        }));
        parts.push(Part::new(format!("sarma/table3/round-{round}"), |places, stop| {
            descriptor::rows(&places.scale, stop)
        }));
    }
    parts.push(Part::new("sarma/table2".into(), hot_path::rows));
    for path in flood::RxPath::ALL {
        parts.push(Part::new(format!("sarma/flood/{}", path.id()), move |places, stop| {
            Ok(flood::rows(places, path, stop))
        }));
    }
    // Each takes seconds.
    let rounds = if scale.quick { 1 } else { scale.rounds.min(3) };
    for round in 1..=rounds {
        for path in flood::RxPath::ALL {
            parts.push(Part::new(
                format!("sarma/starved/{}/round-{round}", path.id()),
                move |places, stop| Ok(starvation::rows(places, path, stop)),
            ));
        }
    }
    parts
}

/// Table 1, the average of Table 2 (Linux 2.6.0), and the numbers of
/// figures 7 and 9 in the text.
pub(super) fn paper_values() -> Vec<PaperValue> {
    let costs =
        atomics::OPERATIONS.map(|(line, value)| PaperValue { table: TABLE_1, line, column: COST, value });
    let mut all = costs.to_vec();
    all.push(PaperValue {
        table: TABLE_2,
        line: hot_path::WRITE,
        column: hot_path::ACQUISITIONS,
        value: 11.7,
    });
    for (column, value) in [(descriptor::FGET_LIGHT, 2.719), (descriptor::FGET, 2.976)] {
        all.push(PaperValue { table: TABLE_3_WRITES, line: descriptor::WRITES, column, value });
    }
    all.push(PaperValue {
        table: FLOOD,
        line: "softirqs, socket/recvfrom",
        column: flood::GRACE_PERIOD_MAX,
        value: 300.0,
    });
    all.push(PaperValue {
        table: FIGURE_9,
        line: "softirqs, socket/recvfrom",
        column: starvation::LONGEST_GAP,
        value: 5000.0,
    });
    all
}

pub(super) fn differences() -> Vec<String> {
    [
        "Table 1: the paper's CPU is a Pentium III at 700 MHz. Cycles are measured by one chain of dependent instructions, instructions by four such chains in parallel. Main memory includes TLB misses. Two virtual CPUs may be on one core or far apart, and the kernel only knows what the hypervisor reports. The transfer time of a cache line shows it: below 25 ns, they are two threads of one core. The address of each transferred line depends on the line before, because a CPU otherwise fetches several at once.",
        "Table 2: the paper counted all acquisitions, with a modified kernel. A stock kernel only reports waits for locks (lock:contention_begin). The table has these, for UDP instead of ext3. With CONFIG_LOCK_STAT, it also has the acquisitions of the whole machine, per datagram and per write.",
        "Table 3: the paper compared kernels (2.5.66: 2.976 s of system time for a million writes of one byte with SMP, and 2.719 s with fget_light, which takes no reference if the descriptor table is not shared; without SMP 2.104 and 1.867 s, which needs a kernel for one CPU). Here, one kernel is measured with a descriptor table of one thread, with a table that two threads share, and with a file registered with io_uring. The bytes go to a temporary file, and the seconds include a little user time.",
        "Figures 7 and 8: the paper's router freed entries of the route cache, which Linux 3.6 removed. With a flood from random sources, the kernel still allocates neighbours and frees them by RCU, if the sources are on the link. So the server here replies, and 5.0.0.0/8 is on its link. The rate is 100,000 datagrams per second, as in the paper.",
        "Grace periods are measured by membarrier(2), which returns after one. The paper instrumented RCU. It gives 300 ms for figure 7 and more than 5 s for figure 9, and no other numbers.",
        "Figure 8 counts softirqs. Threaded NAPI does the same work without softirqs, so that the figure does not show it. Latency is that of answered requests. Another column counts the others.",
        "Both hosts are on one machine. The generator has one CPU. Server, user program and the device's receive work share another one: with `softirqs`, RPS moves the work to that CPU, and with `threaded NAPI`, a kernel thread does it there.",
        "Figure 9: the flood has the generator's maximum rate.",
    ]
    .map(String::from)
    .to_vec()
}
