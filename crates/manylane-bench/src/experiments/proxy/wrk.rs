//! `wrk` as the generator: HTTP, on as many connections as the load with few.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::schema::ProxySample;

/// Sends requests to `url` by this command, which runs `wrk`.
pub(super) fn run(mut command: Command, url: &str, connections: usize, seconds: u64) -> Result<ProxySample> {
    command.args(["--threads", "1", "--latency", "--timeout", "10s"]);
    command.args(["--connections", &connections.to_string(), "--duration", &format!("{seconds}s"), url]);
    let done = command.stdin(Stdio::null()).output().context("cannot start wrk")?;
    let (text, errors) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    ensure!(done.status.success(), "wrk: {}{}", text.trim(), errors.trim());
    parse(&text).with_context(|| format!("unexpected output of wrk: {text}"))
}

/// The samples in its output, without times of a CPU.
fn parse(text: &str) -> Result<ProxySample> {
    let mut sample = ProxySample::default();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["50%", time] => sample.p50_ns = nanoseconds(time)?,
            ["99%", time] => sample.p99_ns = nanoseconds(time)?,
            [requests, "requests", "in", ..] => sample.requests = requests.parse()?,
            ["Requests/sec:", rate] => sample.requests_per_s = rate.parse()?,
            ["Socket", "errors:", ..] | ["Non-2xx", ..] => bail!("{}", line.trim()),
            _ => {}
        }
    }
    ensure!(sample.requests > 0 && sample.p99_ns > 0.0, "no request was answered");
    Ok(sample)
}

/// `1.23ms` and the like.
fn nanoseconds(text: &str) -> Result<f64> {
    // Longer units first: "ms" ends with "s", too.
    for (unit, scale) in [("us", 1e3), ("ms", 1e6), ("s", 1e9), ("m", 60e9)] {
        if let Some(number) = text.strip_suffix(unit) {
            return Ok(number.parse::<f64>().with_context(|| format!("not a time: {text:?}"))? * scale);
        }
    }
    bail!("not a time: {text:?}")
}

/// A duration in the whole seconds that `wrk` takes.
pub(super) fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs_f64().ceil().max(1.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "Running 1s test @ http://10.77.0.2:8000/
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.00ms   61.28us   2.06ms   93.94%
    Req/Sec    12.34k     1.01k    9.71k    70.00%
  Latency Distribution
     50%  345.00us
     75%    1.24ms
     90%    1.30ms
     99%    1.50ms
  12345 requests in 1.00s, 1.21MB read
Requests/sec:  12340.12
Transfer/sec:      1.19MB
";

    #[test]
    fn figures_of_wrk_are_read() {
        let sample = parse(OUTPUT).unwrap();
        assert_eq!((sample.requests, sample.requests_per_s), (12_345, 12_340.12));
        assert_eq!((sample.p50_ns, sample.p99_ns), (345e3, 1.5e6));
        assert_eq!(nanoseconds("2.5s").unwrap(), 2.5e9);
        assert!(nanoseconds("many").is_err());
        let lossy = OUTPUT.to_owned() + "  Socket errors: connect 0, read 3, write 0, timeout 0\n";
        assert!(format!("{:#}", parse(&lossy).unwrap_err()).contains("read 3"));
        assert!(parse("").is_err());
    }

    #[test]
    fn samples_take_whole_seconds() {
        let seconds = [0, 300, 1000, 1200].map(|ms| whole_seconds(Duration::from_millis(ms)));
        assert_eq!(seconds, [1, 1, 1, 2]);
    }
}
