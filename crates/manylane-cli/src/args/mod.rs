//! The command line. Every flag is defined here once. Help, man pages and completions are
//! generated from it.

#[cfg(feature = "bench")]
mod bench;
#[cfg(feature = "bench")]
mod lab;
mod live;
mod machine;
mod proxy;
mod serve;
mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

#[cfg(feature = "bench")]
pub(crate) use self::bench::{
    BatchArgs, BenchArgs, BenchCommand, ChurnArgs, FlapArgs, FloodArgs, GsoArgs, PlaceArgs, ProxyBenchArgs,
    RepliesArgs, RttArgs, RxArgs,
};
#[cfg(feature = "bench")]
pub(crate) use self::lab::{LabArgs, LabPaper};
pub(crate) use self::live::{FilterArgs, LimitArgs, TopArgs};
pub(crate) use self::machine::{DoctorArgs, TuneArgs};
pub(crate) use self::proxy::{ProxyArgs, ProxyStack, port_range};
pub(crate) use self::serve::{CaptureArgs, EchoArgs, RunArgs, SendArgs};
pub(crate) use self::values::CaptureTarget;

/// One UDP socket, a lane per CPU: serve, send and measure.
#[derive(Debug, Parser)]
#[command(name = "manylane", version, arg_required_else_help = true, infer_subcommands = false)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 bad usage.")]
pub(crate) struct Cli {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Log the library's decisions on standard error
    #[arg(long, short, global = true)]
    pub(crate) verbose: bool,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve echo on lanes, with statistics while it runs
    ///
    /// The first line on standard error is `listening on ADDR`. At Ctrl-C or SIGTERM, lanes
    /// accept no new datagrams and answer the queued ones, and the final statistics go to standard
    /// output.
    #[command(
        after_long_help = "Examples:\n  manylane echo 0.0.0.0:7\n  sudo manylane echo 192.0.2.1:7 --engine xdp --interface eth0 --limit 1000/50"
    )]
    Echo(EchoArgs),
    /// Send datagrams at a rate, check the replies, measure latency
    ///
    /// With --expect, the latency of a request counts from when it was due, not from when it was
    /// sent (an open loop), so that a stall of the server shows. Requests of 16 bytes or more have
    /// a number that identifies the reply. Smaller requests, and those with --payload, are matched
    /// by their order in the flow. Missing, late and wrong replies are counted, and do not change
    /// the exit code. It is 1 if no socket listens on the port (ECONNREFUSED) and no reply
    /// arrives.
    #[command(
        after_long_help = "Examples:\n  manylane send 127.0.0.1:7 --rate 100k --duration 5s\n  manylane send 127.0.0.1:7 --rate 20k --flows 64 --expect echo"
    )]
    Send(SendArgs),
    /// Capture frames of lanes with engine xdp, which tcpdump does not see (pcapng)
    ///
    /// Needs root, or the user that the process runs as. Ctrl-C ends the capture and completes the
    /// file. The lanes never wait: frames that do not fit into the buffer are counted, in the file
    /// and at the end. Datagrams that pass through the kernel's stack are not captured; use
    /// tcpdump for those.
    #[command(
        after_long_help = "Examples:\n  manylane capture -w frames.pcapng\n  manylane capture 192.0.2.1:53 | tcpdump -n -r -\n  manylane capture | wireshark -k -i -"
    )]
    Capture(CaptureArgs),
    /// Show lanes of running processes: rates, queues, losses by reason, CPUs
    ///
    /// Shows the lanes of `manylane echo`, of programs under `manylane run`, and of programs that
    /// open a control socket with the library (manylane::control), in the current network
    /// namespace. Root sees all processes, other users see their own. Keys: q or Esc quits, up and
    /// down (or k and j) select a lane, s sorts by another column, space pauses and resumes.
    #[command(after_long_help = "Examples:\n  manylane top\n  manylane top --json --interval 10s")]
    Top(TopArgs),
    /// Limit, deny or allow sources of a running process with engine xdp
    ///
    /// Without options, shows the filter in force and its drop counts. The changes of a call take
    /// effect together, or not at all. Needs root, or the user that the process runs as. The filter
    /// applies to datagrams that arrive as frames through engine xdp, to addresses and ports of
    /// the process. It does not apply to fragments, to packets with IP options, or to datagrams
    /// sent on this machine.
    #[command(
        after_long_help = "Examples:\n  manylane limit 1234\n  manylane limit 1234 --limit 20k,per=24 --allow 192.0.2.0/24"
    )]
    Limit(LimitArgs),
    /// Proxy TCP connections or UDP datagrams to servers, on lanes
    ///
    /// Accepts connections, makes one to a server for each, and moves bytes between the two. With
    /// --udp, forwards datagrams, and the servers' answers to the clients they are for. With
    /// stack xdp, a lane has a TCP stack of its own on the queues of the devices, past the
    /// kernel's; this machine itself cannot connect to it then. The first lines on standard error
    /// are `listening on ADDR`. At Ctrl-C or SIGTERM no more connections are accepted, and those
    /// that there are have --drain-timeout to end. The counters then go to standard output.
    #[command(
        after_long_help = "Examples:\n  manylane proxy --listen 0.0.0.0:8080 --to 10.0.0.1:80,10.0.0.2:80\n  sudo manylane proxy --listen 192.0.2.1:443 --to 10.0.0.1:443 --interface eth0,eth1 --balance hash\n  manylane proxy --udp --listen 0.0.0.0:53 --to 10.0.0.1:53,10.0.0.2:53 --answers 1"
    )]
    Proxy(ProxyArgs),
    /// Run an unmodified server on lanes
    ///
    /// Starts PROGRAM with the preload library, which gives each thread, epoll instance or child
    /// process that receives on a shared UDP socket a lane of its own. The program needs no
    /// change. Sockets that cannot have lanes work as without Manylane, and the report at the end
    /// names them with the reason. Signals are forwarded to the program. The exit code is the
    /// program's, or 125 (Manylane failed), 126 (the program cannot be executed) or 127 (the
    /// program was not found).
    #[command(
        after_long_help = "Examples:\n  manylane run -- memcached -u nobody -t 4 -U 11211\n  sudo manylane run --engine xdp --interface eth0 -- setpriv --reuid=nobody --clear-groups ./server"
    )]
    Run(RunArgs),
    /// Check what limits UDP on this machine, and what to change
    ///
    /// Reads the kernel, devices, settings and counters of the current network namespace, and
    /// changes nothing. Each finding says what was found, why it matters and what to run, the most
    /// costly first. The exit code is 1 if datagrams were lost or a finding limits this machine,
    /// and 0 with notes alone. As root it also shows which processes own the sockets.
    #[command(
        after_long_help = "Examples:\n  sudo manylane doctor\n  sudo manylane doctor --port 53 --duration 10s"
    )]
    Doctor(DoctorArgs),
    /// Apply the doctor's advice, or revert it
    ///
    /// Without a finding and without --all, lists the possible changes. Each change is shown
    /// before it is made, and the previous value is saved to the file of --state. --undo restores
    /// it, even after a crash or a reboot. It names settings that were changed by other means
    /// since then, and does not restore them. The changes themselves do not survive a reboot.
    #[command(
        after_long_help = "Examples:\n  sudo manylane tune --dry-run --all\n  sudo manylane tune rmem-max-small gro-off:eth0\n  sudo manylane tune --undo"
    )]
    Tune(TuneArgs),
    /// Compare lanes with receivers written by hand
    #[cfg(feature = "bench")]
    Bench {
        /// The benchmark.
        #[command(subcommand)]
        bench: BenchCommand,
    },
    /// Run the experiments of published papers on this machine
    ///
    /// Each table is printed in the paper's form, with the paper's numbers beside those of this
    /// machine, ratios to a baseline, and the differences from the paper's set-up. Progress is
    /// saved to a file, so that --resume can continue an interrupted run.
    #[cfg(feature = "bench")]
    #[command(after_long_help = "Examples:\n  manylane lab list\n  sudo manylane lab rivera --quick")]
    Lab(LabArgs),
    /// Write the man pages
    #[command(after_long_help = "Example:\n  manylane man --out target/man")]
    Man(ManArgs),
    /// Print the completions of a shell
    #[command(after_long_help = "Example:\n  manylane completions bash > /etc/bash_completion.d/manylane")]
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
    use std::time::Duration;

    use clap::CommandFactory;
    use manylane::{Placement, Steering};

    use super::serve::LaneArgs;
    use super::*;

    #[test]
    fn the_command_definition_is_valid() {
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
    fn each_option_of_echo_and_run_has_a_heading_of_its_own() {
        let headings = |name: &str| -> Vec<(String, Option<String>)> {
            let mut cli = Cli::command();
            let command = cli.find_subcommand_mut(name).unwrap();
            let options = command.get_opts().filter(|option| !option.is_global_set());
            let heading =
                |option: &clap::Arg| (option.get_id().to_string(), option.get_help_heading().map(Into::into));
            options.map(heading).collect()
        };
        for name in ["echo", "run"] {
            let found = headings(name);
            assert!(found.iter().all(|(_, heading)| heading.is_some()), "{name}: {found:?}");
            // Those of flattened structs do not pass on to the options that follow.
            for (option, expected) in [("limit", "Engine xdp"), ("metrics", "Output"), ("lanes", "Lanes")] {
                assert!(found.contains(&(option.into(), Some(expected.into()))), "{name}: {found:?}");
            }
        }
        assert!(headings("limit").iter().all(|(_, heading)| heading.is_none()));
    }

    #[test]
    fn options_that_echo_and_run_share_are_one_declaration() {
        let mut cli = Cli::command();
        cli.build();
        let options = |name: &str| cli.find_subcommand(name).unwrap().get_opts().collect::<Vec<_>>();
        let mut shared = 0;
        for echo in options("echo").into_iter().filter(|option| !option.is_global_set()) {
            let Some(run) = options("run").into_iter().find(|run| run.get_long() == echo.get_long()) else {
                continue;
            };
            // All that is declared of an option, except its place in the help.
            let declared = |option: &clap::Arg| format!("{:?}", option.clone().display_order(0));
            assert_eq!(declared(run), declared(echo));
            shared += 1;
        }
        assert!(shared >= 10, "{shared}");
    }

    #[test]
    fn every_command_has_an_example() {
        fn check(command: &clap::Command) {
            let help = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            let is_group = command.has_subcommands();
            assert!(is_group || help.contains("manylane"), "{} has no example", command.get_name());
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn bench_and_lab_are_commands_of_the_feature() {
        let command = Cli::command();
        let has = ["bench", "lab"].map(|name| command.find_subcommand(name).is_some());
        assert_eq!(has, [cfg!(feature = "bench"); 2]);
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
        assert!(matches!(echo.common.steering, Some(Steering::Key { .. })));
        for bad in [["--steering", "sideways"], ["--placement", "x"], ["--gro", "maybe"], ["--lanes", "0"]] {
            assert_eq!(parse(&bad).unwrap_err().exit_code(), 2, "{bad:?}");
        }
    }

    #[test]
    fn options_after_the_program_belong_to_it() {
        let parse = |words: &[&str]| {
            let all = [&["manylane", "run"], words].concat();
            match Cli::try_parse_from(all).map(|cli| cli.command) {
                Ok(Command::Run(run)) => Ok(run),
                Ok(_) => panic!("not run"),
                Err(err) => Err(err.exit_code()),
            }
        };
        let run =
            parse(&["--lanes", "2", "--interval", "5s", "--", "server", "--lanes", "-p", "53"]).unwrap();
        let LaneArgs { lanes, interval, .. } = run.common;
        assert_eq!((lanes, interval, run.json_file), (Some(2), Some(Duration::from_secs(5)), None));
        assert_eq!(run.command, ["server", "--lanes", "-p", "53"]);
        let run = parse(&["--interval=0.5", "server", "-x", "--", "--exec"]).unwrap();
        assert_eq!((run.common.interval, run.exec), (Some(Duration::from_millis(500)), false));
        assert_eq!(run.command, ["server", "-x", "--", "--exec"]);
        let run = parse(&["--json-file", "-", "--interval", "0", "server"]).unwrap();
        assert_eq!((run.json_file, run.common.interval), (Some("-".into()), Some(Duration::ZERO)));
        for bad in [
            &[][..],
            &["--"],
            &["--lanes", "0", "x"],
            &["--ports", "53-", "x"],
            &["--exec", "--interval", "5s", "x"],
        ] {
            assert_eq!(parse(bad).unwrap_err(), 2, "{bad:?}");
        }
    }

    #[cfg(feature = "bench")]
    #[test]
    fn bench_lists_and_defaults_are_parsed() {
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
