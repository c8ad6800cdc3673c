//! The settings of a benchmark.

use serde::Serialize;

/// Settings of a benchmark, sufficient to repeat it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct BenchSettings {
    /// The command line.
    pub command: String,
    /// Start time, in seconds since 1970.
    pub started_unix: u64,
    /// `loopback` or `testbed`.
    pub setup: String,
    /// The device that the traffic went through, with its queues.
    pub device: String,
    /// The sender of the traffic.
    pub sender: String,
    /// CPU of the sender.
    pub sender_cpus: Vec<usize>,
    /// CPUs that the receiving threads are pinned to, in turn.
    pub receiver_cpus: Vec<usize>,
    /// Numbers of receiving threads that were compared.
    pub threads: Vec<usize>,
    /// Payload sizes in bytes that were compared.
    pub sizes: Vec<usize>,
    /// Receivers that were compared.
    pub receivers: Vec<String>,
    /// Rounds; every receiver is measured once in each.
    pub rounds: usize,
    /// Length of a sample in seconds.
    pub sample_seconds: f64,
    /// Number of flows.
    pub flows: usize,
    /// Datagrams that one call may take.
    pub batch: usize,
    /// Requested receive buffer of each socket, in bytes.
    pub recv_buffer: usize,
    /// Delay of lanes and `reuseport/*` after a batch that was not full, in microseconds, for each
    /// of `threads`.
    pub rx_usecs: Vec<u64>,
    /// The same of `xsk/*` and `lane/xdp`; empty without them.
    pub xdp_rx_usecs: Vec<u64>,
    /// Steering of `lane/*`, with its backend.
    pub steering: String,
    /// Simulated work of every receiver for each datagram, in nanoseconds, done as a calibrated
    /// number of steps.
    #[serde(skip_serializing_if = "is_nothing")]
    pub work_nanos: u64,
    /// Largest share of datagrams that a sustained rate may lose.
    pub loss_limit: f64,
    /// Length of a trial of the search for sustained rates, in seconds. Below two, what is found is
    /// an estimate.
    pub trial_seconds: f64,
    /// True for a shortened run.
    pub quick: bool,
    /// Notes for a comparison with another run.
    pub notes: Vec<String>,
}

impl BenchSettings {
    /// Names and values for a report.
    #[must_use]
    pub fn entries(&self) -> Vec<(&'static str, String)> {
        let cpus = |list: &[usize]| list.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let delays = |all: &[u64]| {
            let each = self.threads.iter().zip(all);
            each.map(|(threads, usecs)| format!("{usecs} µs with {threads} threads"))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let mut entries = vec![
            ("Command", self.command.clone()),
            ("Traffic", format!("{} over {} ({})", self.sender, self.device, self.setup)),
            ("CPU of the sender", cpus(&self.sender_cpus)),
            ("CPUs of the receivers", cpus(&self.receiver_cpus)),
            ("Batch, receive buffer", format!("{} datagrams, {} bytes", self.batch, self.recv_buffer)),
            ("Delay of lane/mmsg and reuseport/* after a batch that was not full", delays(&self.rx_usecs)),
            ("Delay of lane/xdp and xsk/* after a batch that was not full", delays(&self.xdp_rx_usecs)),
            ("Steering of lanes", self.steering.clone()),
        ];
        if self.work_nanos > 0 {
            entries.push(("Work of the application for each datagram", format!("{} ns", self.work_nanos)));
        }
        entries.extend(self.notes.iter().map(|note| ("Note", note.clone())));
        entries
    }
}

fn is_nothing(number: &u64) -> bool {
    *number == 0
}
