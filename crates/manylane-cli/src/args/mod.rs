//! The command line: every flag is defined here once; help, man pages and completions come from it.

mod bench;
mod lab;
mod live;
mod machine;
mod serve;
mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

pub(crate) use self::bench::{
    BatchArgs, BenchArgs, BenchCommand, ChurnArgs, FlapArgs, FloodArgs, GsoArgs, PlaceArgs, RepliesArgs,
    RttArgs, RxArgs,
};
pub(crate) use self::lab::{LabArgs, LabPaper};
pub(crate) use self::live::{FilterArgs, LimitArgs, TopArgs};
pub(crate) use self::machine::{DoctorArgs, TuneArgs};
pub(crate) use self::serve::{CaptureArgs, EchoArgs, RunArgs, SendArgs};
pub(crate) use self::values::CaptureTarget;

/// One UDP socket, a lane per core: serve, send and measure.
#[derive(Debug, Parser)]
#[command(name = "manylane", version, arg_required_else_help = true, infer_subcommands = false)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 bad usage.")]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Tell on standard error what the library does and decides
    #[arg(long, short, global = true)]
    pub(crate) verbose: bool,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve echo on lanes, with statistics while it runs
    Echo(EchoArgs),
    /// Send datagrams at a rate, check the replies, measure latency
    Send(SendArgs),
    /// Capture what lanes of the engine xdp receive and send, which tcpdump does not see (pcapng)
    Capture(CaptureArgs),
    /// Show live lanes of running processes: rates, queues, losses by reason, processors
    Top(TopArgs),
    /// Limit what sources may send to a running process with engine xdp, deny and allow prefixes
    Limit(LimitArgs),
    /// Run an unmodified server on lanes
    Run(RunArgs),
    /// Find out what this machine can do for UDP, and what holds it back
    Doctor(DoctorArgs),
    /// Apply the doctor's advice, and take it back
    Tune(TuneArgs),
    /// Compare receivers: lanes against what is written by hand
    Bench {
        /// Which benchmark.
        #[command(subcommand)]
        bench: BenchCommand,
    },
    /// Run the experiments of published papers on this machine, their numbers beside ours
    Lab(LabArgs),
    /// Write the man pages
    Man(ManArgs),
    /// Print the completions of a shell
    Completions(CompletionsArgs),
}

/// `manylane man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Folder to write the pages to
    #[arg(long, default_value = "man", value_name = "DIR")]
    pub(crate) out: PathBuf,
}

/// `manylane completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use manylane::{Placement, Steering};

    use super::*;

    #[test]
    fn the_definition_holds() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_and_every_flag_has_help() {
        fn check(command: &clap::Command) {
            assert!(command.get_about().is_some(), "{} has no help", command.get_name());
            for flag in command.get_arguments() {
                assert!(flag.get_help().is_some(), "{} {} has no help", command.get_name(), flag.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn policies_are_parsed() {
        let parse =
            |words: &[&str]| Cli::try_parse_from([&["manylane", "echo", "127.0.0.1:0"], words].concat());
        let Command::Echo(echo) = parse(&["--steering", "key 0:8", "--placement", "0,1"]).unwrap().command
        else {
            panic!("not echo");
        };
        assert_eq!(echo.placement, Placement::List(vec![0, 1]));
        assert!(matches!(echo.steering, Steering::Key { .. }));
        for bad in [["--steering", "sideways"], ["--placement", "x"], ["--gro", "maybe"], ["--lanes", "0"]] {
            assert_eq!(parse(&bad).unwrap_err().exit_code(), 2, "{bad:?}");
        }
    }

    #[test]
    fn what_is_behind_the_program_is_its_own() {
        let parse = |words: &[&str]| {
            let all = [&["manylane", "run"], words].concat();
            match Cli::try_parse_from(all).map(|cli| cli.command) {
                Ok(Command::Run(run)) => Ok(run),
                Ok(_) => panic!("not run"),
                Err(err) => Err(err.exit_code()),
            }
        };
        let run = parse(&["--lanes", "2", "--stats", "--", "server", "--lanes", "-p", "53"]).unwrap();
        assert_eq!((run.lanes, run.stats, run.json), (Some(2), Some(5.0), None));
        assert_eq!(run.command, ["server", "--lanes", "-p", "53"]);
        let run = parse(&["--stats=0.5", "server", "-x", "--", "--exec"]).unwrap();
        assert_eq!((run.stats, run.exec), (Some(0.5), false));
        assert_eq!(run.command, ["server", "-x", "--", "--exec"]);
        for bad in
            [&[][..], &["--"], &["--lanes", "0", "x"], &["--ports", "53-", "x"], &["--exec", "--stats", "x"]]
        {
            assert_eq!(parse(bad).unwrap_err(), 2, "{bad:?}");
        }
    }

    #[test]
    fn lists_and_defaults_of_the_benchmark() {
        let words =
            ["manylane", "bench", "rx", "--threads", "1,4", "--receiver-cpus", "0-1", "--size", "10,1000"];
        let Command::Bench { bench: BenchCommand::Rx(rx) } = Cli::try_parse_from(words).unwrap().command
        else {
            panic!("not bench rx");
        };
        assert_eq!((rx.threads, rx.common.size), (vec![1, 4], vec![10, 1000]));
        assert_eq!(rx.common.receiver_cpus, Some(vec![0, 1]));
        assert_eq!((rx.common.rounds, rx.common.recv_buffer), (5, None));
        assert!(rx.receivers.is_empty());
    }
}
