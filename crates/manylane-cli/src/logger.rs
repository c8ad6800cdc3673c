//! Prints the library's log on standard error: warnings always, other levels with `--verbose`.

use log::{LevelFilter, Log, Metadata, Record};

use crate::output;

struct Logger;

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        // Messages of other crates are not for users.
        if self.enabled(record.metadata()) && record.target().starts_with("manylane") {
            output::eprint_line(&format!("{}: {}", record.level().as_str().to_lowercase(), record.args()));
        }
    }

    fn flush(&self) {}
}

/// Installs the logger, once.
pub(crate) fn install(verbose: bool) {
    if log::set_logger(&Logger).is_ok() {
        log::set_max_level(if verbose { LevelFilter::Debug } else { LevelFilter::Warn });
    }
}
