//! Locks while a receiver's threads read units.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::Result;

use super::reading::{self, Phase, ReadSample, Reader};
use crate::locks::{Contentions, LockMonitor};
use crate::lockstat::{LockClasses, LockStatSession};
use crate::part::Setups;
use crate::switch::SwitchGuard;

/// Memory accounting of UDP sockets created from then on, in a kernel with
/// tests/vm/kernel/lock-stat.patch.
const ACCOUNTING_SWITCH: &str = "/sys/module/udp/parameters/accounting";

/// The observations while units were read.
pub(crate) struct ContentionSample {
    pub(crate) contentions: Contentions,
    pub(crate) reading: ReadSample,
    /// Of a kernel that counts all acquisitions.
    pub(crate) lock_classes: Option<LockClasses>,
}

/// Waits while units are read, without those at the start and end of the readers.
pub(crate) fn sample_contention(
    places: &mut Setups,
    reader: Reader,
    threads: usize,
    stop: &AtomicBool,
) -> Result<ContentionSample> {
    let (mut watch, mut seen) = (None, Contentions::default());
    let (mut counting, mut taken) = (None, None);
    let mut around = |moment| {
        match (moment, &watch) {
            (Phase::Started, _) => {
                watch = Some(LockMonitor::start()?);
                counting = LockStatSession::start()?;
            }
            (Phase::Finished, Some(watch)) => {
                taken = counting.as_ref().map(LockStatSession::read).transpose()?;
                seen = watch.read()?;
            }
            (Phase::Finished, None) => {}
        }
        Ok(())
    };
    let reading = reading::read_units(places, reader, threads, stop, &mut around)?;
    Ok(ContentionSample { contentions: seen, reading, lock_classes: taken })
}

/// The same, of a receiver without memory accounting; or the reason why not.
pub(super) fn sample_without_accounting(
    places: &mut Setups,
    reader: Reader,
    threads: usize,
    stop: &AtomicBool,
) -> Result<ContentionSample, String> {
    let switch = Path::new(ACCOUNTING_SWITCH);
    if !switch.exists() {
        return Err("a stock kernel cannot turn off memory accounting".into());
    }
    let sample =
        SwitchGuard::set(switch, "N").and_then(|_off| sample_contention(places, reader, threads, stop));
    sample.map_err(|err| format!("{err:#}"))
}
