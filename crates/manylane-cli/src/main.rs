//! The program `manylane`: `echo`, `send`, `capture`, `limit`, `top`, `proxy`, `run`, `doctor`,
//! `tune`, its own manual and, with feature `bench`, `bench` and `lab`.
//!
//! Exit codes: 0 done, 1 failed, 2 bad usage. Those of `run` are the program's. Results go to
//! standard output, everything else to standard error. It is not a failure if the reader closes
//! the pipe early.

mod args;
#[cfg(feature = "bench")]
mod bench;
mod capture;
mod doctor;
mod echo;
mod find;
#[cfg(feature = "bench")]
mod lab;
mod limit;
mod loadable;
mod logger;
mod manual;
mod metrics;
mod output;
mod parse;
mod pcapng;
mod progress;
mod proxy;
mod run;
mod send;
mod signals;
mod top;
mod tune;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(err) => {
            // Bad usage goes to standard error, help to standard output. A closed pipe is not an
            // error.
            let _ = err.print();
            return ExitCode::from(u8::try_from(err.exit_code()).unwrap_or(2));
        }
    };
    logger::install(cli.verbose);
    if let Command::Run(args) = &cli.command {
        return run::run(args);
    }
    match execute(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) if output::is_broken_pipe(&err) => ExitCode::SUCCESS,
        // The error has been printed.
        Err(err) if err.is::<output::AlreadyReported>() => ExitCode::FAILURE,
        Err(err) => {
            output::eprint_line(&format!("manylane: {err:#}"));
            if err.is::<output::UsageError>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

fn execute(cli: Cli) -> Result<()> {
    match cli.command {
        Command::Echo(args) => echo::run(&args),
        Command::Send(args) => send::run(&args),
        Command::Capture(args) => capture::run(&args),
        Command::Limit(args) => limit::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Proxy(args) => proxy::run(&args),
        // Handled above, because its exit code is the program's.
        Command::Run(_) => Ok(()),
        Command::Doctor(args) => doctor::run(&args),
        Command::Tune(args) => tune::run(&args),
        #[cfg(feature = "bench")]
        Command::Bench { bench } => bench::run(&bench),
        #[cfg(feature = "bench")]
        Command::Lab(args) => lab::run(&args),
        Command::Man(args) => manual::man(&args),
        Command::Completions(args) => manual::completions(&args),
    }
}
