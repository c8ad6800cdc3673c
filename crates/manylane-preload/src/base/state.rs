//! State of the library: started or not, settings, batching of replies.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::base::settings::Settings;

static READY: AtomicBool = AtomicBool::new(false);
/// State of the batching of replies on kernel sockets: not yet, active, stopped.
static SEND_BATCHING: AtomicU32 = AtomicU32::new(INACTIVE);
const INACTIVE: u32 = 0;
const ACTIVE: u32 = 1;
const STOPPED: u32 = 2;
static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// True if the library handles calls.
#[inline]
pub(crate) fn is_ready() -> bool {
    READY.load(Ordering::Acquire)
}

/// The library handles calls from now on.
pub(crate) fn set_ready() {
    READY.store(true, Ordering::Release);
}

/// Makes all calls the C library's own, for good: `seccomp.rs`.
pub(crate) fn detach() {
    READY.store(false, Ordering::Release);
}

/// Sets the settings; once, at start.
pub(crate) fn set_settings(settings: Settings) {
    _ = SETTINGS.set(settings);
}

/// The settings from the environment.
pub(crate) fn settings() -> Option<&'static Settings> {
    SETTINGS.get()
}

/// True if replies of kernel sockets may be batched.
#[inline]
pub(crate) fn is_send_batching() -> bool {
    SEND_BATCHING.load(Ordering::SeqCst) == ACTIVE
}

/// A socket has outboxes: its replies may be batched.
pub(crate) fn start_send_batching() {
    _ = SEND_BATCHING.compare_exchange(INACTIVE, ACTIVE, Ordering::SeqCst, Ordering::Relaxed);
}

/// The process ends: no more replies are batched.
pub(crate) fn stop_send_batching() {
    SEND_BATCHING.store(STOPPED, Ordering::SeqCst);
}
