//! Salesforce: a TCP proxy on the Linux Kernel Library (LKL), a stack in user space, beside the
//! same proxy on the kernel's stack. Here, the stack in user space is that of a lane over AF_XDP.
//!
//! | module | reproduces |
//! |---|---|
//! | `proxies` | figures 2 and 3: requests per second and latency; CPU time beside them |
//! | `congestion` | what the paper wants it for: throughput and fairness of congestion controls |
//! | `optimisations` | the list of optimisations, each switched off alone; the gap to the kernel |

mod congestion;
mod optimisations;
mod proxies;

use self::congestion::{FAIRNESS, THROUGHPUT};
use self::optimisations::{GAP, OPTIMISATIONS};
use self::proxies::{CPU, FIGURE_2, FIGURE_3};
use crate::paper::PaperValue;
use crate::paper_table::{Baseline, Plot, Table};
use crate::part::Part;
use crate::settings::Scale;

pub(super) fn tables() -> Vec<Table> {
    let kernel = Baseline::Line(proxies::BASELINE);
    vec![
        Table::new(FIGURE_2, "Figure 2: requests per second, by proxy", Some(Plot::Bars("generator")))
            .compared_with(kernel),
        Table::new(FIGURE_3, "Figure 3: time of a request by proxy, µs", Some(Plot::Bars("percentile")))
            .compared_with(kernel),
        Table::new(
            CPU,
            "CPU time of the proxy per request, kernel included, µs",
            Some(Plot::Bars("generator")),
        )
        .compared_with(kernel),
        Table::new(OPTIMISATIONS, "The paper's optimisations: one lane, without each of them", None)
            .compared_with(Baseline::Line(optimisations::ALL)),
        Table::new(
            GAP,
            "The gap: how many times slower than the kernel's stack the one in user space is. Below 1: faster",
            Some(Plot::Bars("figure")),
        ),
        Table::new(
            THROUGHPUT,
            "One connection over 40 Mbit/s with a round trip of 20 ms, by lost segments, Mbit/s",
            Some(Plot::Bars("lost")),
        )
        .compared_with(Baseline::Line(congestion::BASELINE)),
        Table::new(FAIRNESS, "Two connections over the same link: shares of the sum", None),
    ]
}

/// A part for each round of each proxy, and for each round of all optimisations.
pub(super) fn parts(scale: &Scale) -> Vec<Part> {
    let mut parts = Vec::new();
    for round in 1..=scale.rounds {
        for contender in proxies::CONTENDERS {
            let id = format!("salesforce/proxies/{contender}/round-{round}");
            parts.push(Part::new(id, move |places, stop| proxies::rows(places, contender, stop)));
        }
        let id = format!("salesforce/optimisations/round-{round}");
        parts.push(Part::new(id, optimisations::rows));
        let id = format!("salesforce/congestion/round-{round}");
        parts.push(Part::new(id, move |places, stop| congestion::rows(places, round, stop)));
    }
    parts
}

/// The two ratios in the text.
pub(super) fn paper_values() -> Vec<PaperValue> {
    let mut values = Vec::new();
    for (line, value) in [(optimisations::NONE, 10.0), (optimisations::ALL_INSTANCES, 2.0)] {
        for column in [optimisations::RATE_GAP, optimisations::LATENCY_GAP] {
            values.push(PaperValue { table: GAP, line, column, value });
        }
    }
    values
}

pub(super) fn differences() -> Vec<String> {
    [
        "The stack in user space is that of Manylane's lanes, over AF_XDP. The paper's is the Linux kernel itself as a library (LKL), which keeps the kernel's system calls, locks and threads: most of its optimisations avoid what a lane does not have.",
        "Client, proxy and server are three network namespaces joined by veth devices, as the paper's are three containers. The proxy and the kernel threads that receive for its devices (threaded NAPI) have a CPU of their own; clients and servers share another one. The paper does not describe its machine.",
        "The paper's figures have no printed numbers. Its text has two ratios, about 10 at first and about 2 with all optimisations, for both requests per second and latency. Its latency is wrk's average; here it is the median, with the 99th percentile beside it.",
        "wrk sends HTTP on 64 connections; its shortest run takes 1 s. Our generator sends 128 bytes and gets 512, on 64 connections with one request at a time on each. It is the one of the tables of optimisations.",
        "proxy/kernel and proxy/xdp are the same proxy on both stacks, as in the paper. HAProxy and nginx have one thread on the same CPU.",
        "The optimisations are switched on a proxy of the library, on a thread of this process. Each line lacks one of them. \"Without pinning\", the scheduler places the lane's thread on any CPU, also on that of clients and servers; the kernel threads that receive stay where they are.",
        "Offload: AF_XDP has no segmentation by the device, and a lane computes its checksums itself. So the switch is about the devices of all hosts, the kernels of clients and servers included; the kernel's stack has a line without it, too.",
        "Events per wake-up: a lane receives up to 64 frames at a time, of all connections, instead of the paper's mergeable receive buffers. Without it, one. It still sleeps only if no frame is queued.",
        "Buffers: 4 KiB for each direction of a connection instead of 64 KiB. A lane makes no system call for a read or write of a connection, so that only the window of TCP changes. The effect is in the column of bulk traffic, which requests of some hundred bytes cannot show.",
        "Congestion control: the paper names its choice as a reason for a stack in user space, and does not measure it. Here, both servers are behind the same link, which a thread of the lab makes. Its queue holds one bandwidth-delay product, and drops what does not fit.",
        "Instances: a lane for each of two queues, each on a CPU of its own; the device's hash is the load balancer. This needs three CPUs. The paper's ratio of 2 is with instances; that of one lane with all other optimisations is beside it.",
    ]
    .map(String::from)
    .to_vec()
}
