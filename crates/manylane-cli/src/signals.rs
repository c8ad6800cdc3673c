//! Ctrl-C and SIGTERM: the first asks to end in order, a second one ends at once.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// A flag that is set by the first signal. By the second, the program ends with 1 at once.
pub(crate) fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: at the first signal the flag is not set yet when the shutdown looks at it.
        flag::register_conditional_shutdown(signal, 1, stop.clone())
            .and_then(|_| flag::register(signal, stop.clone()))
            .context("cannot handle signals")?;
    }
    Ok(stop)
}
