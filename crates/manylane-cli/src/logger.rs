//! What the library has to say, on standard error: warnings always, the rest with `--verbose`.

use log::{LevelFilter, Log, Metadata, Record};

use crate::output;

struct Logger;

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        // Other crates than ours have their own idea of what is worth a line.
        if self.enabled(record.metadata()) && record.target().starts_with("manylane") {
            output::eprint_line(&format!("{}: {}", record.level().as_str().to_lowercase(), record.args()));
        }
    }

    fn flush(&self) {}
}

/// Installs it, once.
pub(crate) fn install(verbose: bool) {
    if log::set_logger(&Logger).is_ok() {
        log::set_max_level(if verbose { LevelFilter::Debug } else { LevelFilter::Warn });
    }
}
