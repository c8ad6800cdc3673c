//! Ctrl-C and SIGTERM: the first one requests an orderly shutdown, a second one exits at once.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

/// A flag that each SIGHUP sets.
pub(crate) fn hangup_flag() -> Result<Arc<AtomicBool>> {
    let hangup = Arc::new(AtomicBool::new(false));
    flag::register(SIGHUP, Arc::clone(&hangup)).context("cannot handle signals")?;
    Ok(hangup)
}

/// A flag that the first signal sets. At the second one, the program exits with 1 at once.
pub(crate) fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The order matters: at the first signal, the flag must not be set yet when the shutdown
        // handler checks it.
        flag::register_conditional_shutdown(signal, 1, stop.clone())
            .and_then(|_| flag::register(signal, stop.clone()))
            .context("cannot handle signals")?;
    }
    Ok(stop)
}
