//! `manylane run` from outside: how it starts programs, passes on signals, and ends; what it
//! reports of programs that cannot be preloaded. Without traffic.

use std::fs;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};

use manylane_sys::process;
use manylane_test_support::wait_for;
use manylane_testbed::skip;
use serde_json::Value;

use crate::program::{stderr, stdout};

const PROGRAM: &str = env!("CARGO_BIN_EXE_manylane");

fn run(words: &[&str]) -> Output {
    Command::new(PROGRAM).arg("run").args(words).stdin(Stdio::null()).output().unwrap()
}

/// An empty folder of its own.
fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// `manylane run` in a process group of its own, as a shell starts it. The group is killed when the
/// test fails.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    fn start(words: &[&str]) -> Self {
        let mut command = Command::new(PROGRAM);
        command.arg("run").args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.process_group(0).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    fn line(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    fn wait(&mut self) -> ExitStatus {
        wait_for("the end of `run`", || self.child.try_wait().unwrap(), Option::is_some).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The whole group.
        let _ = process::send_signal(-self.pid(), 9);
        let _ = self.child.wait();
    }
}

/// The state of a process in `/proc`: T is stopped. None if there is no such process, or if it is a
/// zombie.
fn state(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next().filter(|state| *state != 'Z')
}

#[test]
fn run_passes_on_the_exit_status() {
    for code in [0, 1, 2, 7, 125, 255] {
        let output = run(&["--", "sh", "-c", &format!("exit {code}")]);
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
    }
    for signal in ["TERM", "INT", "KILL", "PIPE", "SEGV", "USR1", "HUP"] {
        let script = format!("kill -{signal} $$; sleep 60");
        let alone = Command::new("sh").args(["-c", &script]).status().unwrap();
        let output = run(&["--", "sh", "-c", &script]);
        assert_eq!(output.status.signal(), alone.signal(), "{signal}: {}", stderr(&output));
        assert!(output.status.signal().is_some());
    }
}

#[test]
fn run_failures_have_the_exit_codes_of_shells() {
    for (words, code, hint) in [
        (&["--", "no-such-program"][..], 127, "no-such-program: no such program"),
        (&["--no-such-option", "--", "true"][..], 125, "unknown option --no-such-option"),
        (&["--", "/etc/passwd"], 126, "permission denied"),
        (&["--", "/etc"], 126, "permission denied"),
        (&["--"], 2, "PROGRAM"),
        (&["--ports", "x", "--", "true"], 2, "8000-8010"),
        (&["--steering", "sideways", "--", "true"], 2, "round-robin"),
        (&["--rx-usecs", "20001", "--", "true"], 2, "20000"),
        (&["--lanes", "65", "--", "true"], 125, "at most 64 lanes"),
        (&["--engine", "uring", "--", "true"], 125, "use mmsg or xdp"),
        (&["--json-file", "/nowhere/x", "--", "true"], 125, "/nowhere/x"),
        (&["--json", "/nowhere/x", "--", "true"], 125, "unknown option --json"),
    ] {
        let output = run(words);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(hint), "{words:?} does not hint at {hint}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{words:?}");
    }
    let output =
        Command::new(PROGRAM).args(["run", "true"]).env("MANYLANE_PRELOAD", "/no.so").output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("MANYLANE_PRELOAD is /no.so"), "{}", stderr(&output));
}

#[test]
fn too_many_port_ranges_are_an_error_before_the_program_starts() {
    let ports = (1..=33).map(|port| port.to_string()).collect::<Vec<_>>().join(",");
    let output = run(&["--ports", &ports, "--", "echo", "started"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("at most 32 ports and ranges, not 33"), "{}", stderr(&output));
    assert!(output.stdout.is_empty());
}

#[test]
fn invalid_inherited_ports_are_refused_before_the_start() {
    let run = |ports: &str, options: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.arg("run").args(options).args(["--", "echo", "started"]).env("MANYLANE_PORTS", ports);
        command.output().unwrap()
    };
    let output = run("0-9", &[]);
    assert_eq!(output.status.code(), Some(125), "{}", stderr(&output));
    assert!(stderr(&output).contains("invalid MANYLANE_PORTS=0-9: expected ports"), "{}", stderr(&output));
    assert!(output.stdout.is_empty());
    // Empty is unset, and the option overrides the variable.
    for output in [run("", &[]), run("53", &[]), run("0-9", &["--ports", "53"])] {
        assert_eq!(stdout(&output), "started\n", "{}", stderr(&output));
    }
}

#[test]
fn run_passes_on_stdio_and_environment() {
    let mut command = Command::new(PROGRAM);
    command.args(["run", "--lanes", "3", "--ports", "53", "--rx-usecs", "70", "--engine", "mmsg"]);
    command.args(["--steering", "key 0:8", "--", "sh", "-c"]).arg(
        r#"echo "$LD_PRELOAD|$MANYLANE_LANES|$MANYLANE_PORTS|$MANYLANE_RX_USECS|$MANYLANE_ENGINE|$MANYLANE_STEERING|$0|$1"
        cat; echo problem >&2"#,
    );
    command.args(["zero", "--one"]).env("LD_PRELOAD", "/usr/lib/x/users.so");
    command.stdin(Stdio::from(fs::File::open("/etc/hostname").unwrap()));
    let output = command.output().unwrap();
    let text = stdout(&output);
    let (line, input) = text.split_once('\n').unwrap();
    let (preload, rest) = line.split_once('|').unwrap();
    assert!(preload.starts_with("/usr/lib/x/users.so:/") && preload.ends_with(".so"), "{preload}");
    assert_eq!(rest, "3|53|70|mmsg|key 0:8|zero|--one");
    assert_eq!(input, fs::read_to_string("/etc/hostname").unwrap());
    assert!(stderr(&output).contains("problem\n"), "{}", stderr(&output));
    // The name that it was started by, on which the behaviour of some programs depends.
    let output = run(&["--quiet", "--", "sh", "-c", "tr '\\0' ' ' </proc/$$/cmdline"]);
    assert!(stdout(&output).starts_with("sh -c "), "{}", stdout(&output));
}

#[test]
fn run_finds_the_installed_library() {
    let folder = folder("run-installed");
    let place = |path: &str| {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    };
    let output = run(&["--", "sh", "-c", "echo $LD_PRELOAD"]);
    let built = stdout(&output).trim_end().rsplit(':').next().unwrap().to_owned();
    let (program, library) = (place("bin/manylane"), place("lib/manylane/libmanylane_preload.so"));
    fs::hard_link(PROGRAM, &program).unwrap();
    fs::copy(built, &library).unwrap();
    let link = place("elsewhere/manylane");
    std::os::unix::fs::symlink(&program, &link).unwrap();
    for start in [&program, &link] {
        let output =
            Command::new(start).args(["run", "--", "sh", "-c", "echo $LD_PRELOAD"]).output().unwrap();
        assert_eq!(stdout(&output).trim_end(), fs::canonicalize(&library).unwrap().to_str().unwrap());
    }
    fs::remove_file(library).unwrap();
    let output = Command::new(&link).args(["run", "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("make install"), "{}", stderr(&output));
}

/// Prints the name of each signal that it receives, and exits with 5 after TERM.
const LISTENER: &str = r#"
for name in HUP INT QUIT USR1 USR2 ALRM WINCH CONT TSTP TTIN TTOU; do trap "echo $name" $name; done
trap "echo TERM; exit 5" TERM
echo $$
while :; do sleep 0.01; done"#;

#[test]
fn run_forwards_signals_once() {
    // Not sh, which handles no signal while it waits for a child, and may merge two signals.
    let mut running = Running::start(&["--", "bash", "-c", LISTENER]);
    let program: i32 = running.line().parse().unwrap();
    assert_ne!(program, running.pid());
    for (name, number) in [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("USR1", 10),
        ("USR2", 12),
        ("ALRM", 14),
        ("WINCH", 28),
        ("TTIN", 21),
    ] {
        process::send_signal(running.pid(), number).unwrap();
        assert_eq!(running.line(), name);
    }
    process::send_signal(running.pid(), 15).unwrap();
    assert_eq!(running.line(), "TERM");
    assert_eq!(running.wait().code(), Some(5));
    assert!(running.lines.next().is_none());
}

#[test]
fn run_delivers_group_signals_once() {
    let script = r#"count=0; trap 'count=$((count+1))' TERM; kill -TERM 0; for i in 1 2 3 4 5 6 7 8; do sleep 0.02; done
        echo $count"#;
    let mut running = Running::start(&["--", "bash", "-c", script]);
    assert_eq!(running.line(), "1");
    // Its children, killed by the same signal, do not matter.
    assert_eq!(running.wait().code(), Some(0));
}

#[test]
fn run_stops_and_continues_with_its_program() {
    let mut running = Running::start(&["--", "sh", "-c", "echo $$; exec sleep 600"]);
    let (launcher, program): (i32, i32) = (running.pid(), running.line().parse().unwrap());
    let both = |wanted: char| {
        let states = || [launcher, program].map(state);
        wait_for(&format!("both in state {wanted}"), states, |states| *states == [Some(wanted); 2]);
    };
    for _ in 0..3 {
        // To the process group, as Ctrl-Z and fg do it.
        process::send_signal(-launcher, 20).unwrap();
        both('T');
        process::send_signal(-launcher, 18).unwrap();
        both('S');
        // To the launcher alone.
        process::send_signal(launcher, 20).unwrap();
        both('T');
        process::send_signal(launcher, 18).unwrap();
        both('S');
    }
    // SIGSTOP to the program stops only the program.
    process::send_signal(program, 19).unwrap();
    wait_for("the program to stop", || state(program), |state| *state == Some('T'));
    wait_for("the launcher to sleep", || state(launcher), |state| *state == Some('S'));
    process::send_signal(launcher, 18).unwrap();
    both('S');
    process::send_signal(launcher, 15).unwrap();
    assert_eq!(running.wait().signal(), Some(15));
}

#[test]
fn killing_the_launcher_kills_the_program() {
    let mut running = Running::start(&["--", "sh", "-c", "echo $$; exec sleep 600"]);
    let program: i32 = running.line().parse().unwrap();
    running.child.kill().unwrap();
    wait_for("the program to end", || state(program), Option::is_none);
}

#[test]
fn run_can_exec_the_program() {
    let mut running =
        Running::start(&["--exec", "--", "sh", "-c", "echo $$ ${MANYLANE_REPORT-none}; exit 3"]);
    let pid = running.pid();
    assert_eq!(running.line(), format!("{pid} none"));
    assert_eq!(running.wait().code(), Some(3));
    let output = run(&["--exec", "--", "no-such-program"]);
    assert_eq!(output.status.code(), Some(127));
}

#[test]
fn run_leaves_or_follows_daemons() {
    let script = "sleep 600 >/dev/null 2>&1 & echo $!; echo $$";
    let mut running = Running::start(&["--", "sh", "-c", script]);
    let left: i32 = running.line().parse().unwrap();
    assert_eq!(running.wait().code(), Some(0));
    assert!(state(left).is_some(), "it ended with the program");
    process::send_signal(left, 9).unwrap();

    let mut running = Running::start(&["--follow", "--", "sh", "-c", script]);
    let left: i32 = running.line().parse().unwrap();
    // Until its end has been noticed, the signal would go to the program.
    let program = PathBuf::from(format!("/proc/{}", running.line()));
    wait_for("the end of the program to be noticed", || program.exists(), |exists| !exists);
    process::send_signal(running.pid(), 15).unwrap();
    assert_eq!(running.wait().signal(), Some(15));
    assert!(state(left).is_none());
}

#[test]
fn a_signal_ends_run_while_its_report_has_no_reader() {
    let fifo = folder("run-fifo").join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let mut running = Running::start(&["--json-file", fifo.to_str().unwrap(), "--", "true"]);
    wait_for("`run` to sleep", || state(running.pid()), |state| *state == Some('S'));
    // It may still sleep because its program runs, which then gets the signal.
    let end = || {
        process::send_signal(running.pid(), 2).unwrap();
        running.child.try_wait().unwrap()
    };
    let status = wait_for("the end of `run`", end, Option::is_some).unwrap();
    assert_eq!(status.signal(), Some(2));
}

#[test]
fn run_writes_a_json_report() {
    let folder = folder("run-json");
    let path = folder.join("run.json");
    let output =
        run(&["--json-file", path.to_str().unwrap(), "--lanes", "2", "--quiet", "--", "sh", "-c", "exit 4"]);
    assert_eq!(
        (output.status.code(), stdout(&output), stderr(&output)),
        (Some(4), String::new(), String::new())
    );
    let read = |text: &str| -> Value { serde_json::from_str(text).unwrap() };
    let document = read(&fs::read_to_string(&path).unwrap());
    assert_eq!(document["schema"], "manylane.run.v1");
    let settings = &document["settings"];
    assert_eq!(
        (&settings["lanes"], &settings["exit_code"], &settings["signal"]),
        (&2.into(), &4.into(), &Value::Null)
    );
    assert!(settings["program"].as_str().unwrap().ends_with("/sh"), "{settings}");
    assert_eq!(document["rows"].as_array().unwrap().len(), 0);
    assert!(document["machine"]["kernel"].as_str().unwrap().contains('.'));
    let output = run(&["--json-file", "-", "--", "sh", "-c", "kill $$"]);
    assert_eq!(read(&stdout(&output))["settings"]["signal"], 15);
}

#[test]
fn programs_cannot_truncate_the_report() {
    // By path, and by the inherited descriptor.
    let script = r#"
        test -e "$MANYLANE_REPORT" && test -e "/proc/self/fd/${MANYLANE_REPORT##*/}" || exit 9
        (: >"$MANYLANE_REPORT") 2>&- && exit 8
        truncate -s 0 "$MANYLANE_REPORT" 2>&- && exit 7
        truncate -s 0 "/proc/self/fd/${MANYLANE_REPORT##*/}" 2>&- && exit 6
        exit 0"#;
    let output = run(&["--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(0), "{:?}: {}", output.status, stderr(&output));
    assert!(stderr(&output).contains("no thread received on a UDP socket"), "{}", stderr(&output));
}

/// Runs a program that waits until it is told to end, and ends it once standard error has a line
/// with `wanted`.
fn wait_for_stderr(wanted: &str, options: &[&str], variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(PROGRAM);
    command.arg("run").args(options).args(["--", "sh", "-c", "read line"]).envs(variables.iter().copied());
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let input = child.stdin.take();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut said: Vec<String> = Vec::new();
    while !said.last().is_some_and(|line| line.contains(wanted)) {
        said.push(lines.next().unwrap_or_else(|| panic!("it never says {wanted}: {said:?}")));
    }
    drop(input);
    said.extend(lines);
    assert_eq!(child.wait().unwrap().code(), Some(1));
    said.join("\n")
}

#[test]
fn run_logs_events_while_the_program_runs() {
    let said = wait_for_stderr("no lanes, 0/s delivered, 0/s sent", &["--interval=20ms"], &[]);
    assert!(said.ends_with("no thread received on a UDP socket"), "{said}");
}

#[test]
fn metrics_are_served_and_signals_stay_the_launchers() {
    let script = "trap 'exit 7' TERM; echo ready; while :; do read line || exit 8; done";
    let mut child = Command::new(PROGRAM)
        .args(["run", "--metrics", "0", "--quiet", "--", "sh", "-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Kept open: `wait` closes the pipe, which would end the script.
    let input = child.stdin.take();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let at = lines.find_map(|line| Some(line.strip_prefix("metrics at http://")?.to_owned())).unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut String::new()).unwrap();
    let ask = || {
        let mut stream = std::net::TcpStream::connect(at.strip_suffix("/metrics").unwrap()).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).map(|_| page).map_err(|err| err.kind())
    };
    // The launcher waits 2 s for a client, which may have no CPU for so long.
    let page = wait_for("a page", ask, |page| page.as_ref().is_ok_and(|page| !page.is_empty())).unwrap();
    assert!(page.contains("\nmanylane_run_processes_total 1\n"), "{page}");
    assert!(page.contains("\nmanylane_run_lanes 0\n"), "{page}");
    let kill = Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    assert_eq!(child.wait().unwrap().code(), Some(7));
    drop(input);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    let output = run(&["--metrics", &taken, "--", "sh", "-c", "echo started"]);
    // Obstacles are reported before anything is started.
    assert_eq!((output.status.code(), stdout(&output)), (Some(125), String::new()));
    assert!(stderr(&output).contains(&taken), "{}", stderr(&output));
}

#[test]
fn run_reports_a_library_that_was_not_loaded() {
    // The dynamic linker ignores a preloaded file that is no library.
    let variables = [("MANYLANE_PRELOAD", "/etc/hostname")];
    let said =
        wait_for_stderr("runs without lanes: the dynamic linker has not loaded the library", &[], &variables);
    assert!(said.ends_with("no lanes: the library was not loaded into any process"), "{said}");
}

#[test]
fn programs_that_have_dropped_their_privileges_still_report() {
    const TEST: &str = "programs_that_have_dropped_their_privileges_still_report";
    if !skip::need_root(TEST) {
        return;
    }
    // In a place that everyone can read, unlike the output of cargo.
    let folder = tempfile::TempDir::new().unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    let built = stdout(&run(&["--", "sh", "-c", "echo $LD_PRELOAD"]));
    let library = folder.path().join("library.so");
    fs::copy(built.trim_end().rsplit(':').next().unwrap(), &library).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args([
        "run",
        "--quiet",
        "--json-file",
        "-",
        "--",
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
    ]);
    command.args(["--clear-groups", "sh", "-c", "exec sh -c 'exit 3'"]).env("MANYLANE_PRELOAD", &library);
    let output = command.output().unwrap();
    assert_eq!((output.status.code(), stderr(&output)), (Some(3), String::new()));
    let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(document["processes"], 3, "{document}");
}

/// Compiles a C program, with `more` arguments for the compiler.
fn compile(folder: &Path, name: &str, source: &str, more: &[&str]) -> PathBuf {
    let (code, program) = (folder.join(format!("{name}.c")), folder.join(name));
    fs::write(&code, source).unwrap();
    let output = Command::new("cc").arg("-o").arg(&program).arg(&code).args(more).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    program
}

#[test]
fn run_reports_programs_that_cannot_be_preloaded() {
    let folder = folder("run-beyond");
    let source = "#include <stdlib.h>\nint main(void) { return getenv(\"LD_PRELOAD\") ? 9 : 8; }\n";
    let fixed = compile(&folder, "fixed", source, &["-static"]);
    let go = "__attribute__((section(\".go.buildinfo\"), used)) static const char mark[] = \"go\";\n";
    let go = compile(&folder, "go", &(go.to_owned() + source), &[]);
    let musl = compile(&folder, "musl", source, &["-Wl,--dynamic-linker=/lib/ld-musl-none.so.1"]);
    let script = folder.join("script");
    // By another process: a file that a child of another test still has open for writing is busy
    // (ETXTBSY).
    let write =
        format!("echo '#!{}' > {script}; chmod 755 {script}", fixed.display(), script = script.display());
    assert!(Command::new("sh").args(["-c", &write]).status().unwrap().success());
    for (program, code, hint) in [
        (&fixed, 8, "statically linked"),
        // It is still preloaded: it may need other libraries of the user, and ours does no harm.
        (&go, 9, "Go program"),
        (&script, 8, "statically linked"),
        (&musl, 127, "ld-musl-none.so.1"),
    ] {
        let output = run(&["--", program.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(code), "{program:?}: {}", stderr(&output));
        let said = stderr(&output);
        let lines: Vec<&str> = said.lines().filter(|line| line.contains("it runs without lanes")).collect();
        assert!(matches!(lines[..], [line] if line.contains(hint)), "{program:?}: {said}");
        let output = run(&["--strict", "--", program.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(125), "{program:?}: {}", stderr(&output));
        let said = stderr(&output);
        assert!(said.contains(hint) && said.contains("it is not started (--strict)"), "{program:?}: {said}");
    }
}

#[test]
fn run_reports_setuid_programs() {
    if !skip::need_root("run_reports_setuid_programs") {
        return;
    }
    let folder = folder("run-secure");
    let source = "#include <sys/auxv.h>\nint main(void) { return getauxval(AT_SECURE) ? 8 : 7; }\n";
    for (name, owner, mode, hint) in [
        ("user", (1, 0), 0o4755, Some("set-user-ID")),
        ("group", (0, 1), 0o2755, Some("set-group-ID")),
        ("ours", (0, 0), 0o6755, None),
        ("locking", (0, 1), 0o2745, None),
    ] {
        let program = compile(&folder, name, source, &[]);
        std::os::unix::fs::chown(&program, Some(owner.0), Some(owner.1)).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        let output = run(&["--", program.to_str().unwrap()]);
        // The kernel does the same.
        let code = if hint.is_some() { 8 } else { 7 };
        assert_eq!(output.status.code(), Some(code), "{name}: {}", stderr(&output));
        let told = stderr(&output).lines().find(|line| line.contains("secure-execution")).map(str::to_owned);
        assert_eq!(told.is_some(), hint.is_some(), "{name}: {}", stderr(&output));
        assert!(told.unwrap_or_default().contains(hint.unwrap_or_default()));
    }
}

/// A socket is bound, and closed by a direct system call, as libuv does it; then a file gets its
/// descriptor number.
const PYTHON_CLOSE_SCRIPT: &str = r#"
import ctypes, os, platform, socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("127.0.0.1", 0))
close, fd = 57 if platform.machine() == "aarch64" else 3, sock.detach()
ctypes.CDLL(None).syscall(ctypes.c_long(close), ctypes.c_long(fd))
file = os.open("/proc/self/comm", os.O_RDONLY)
print(file == fd, os.read(file, 100))
"#;

/// The same in Node.js, which is built on libuv.
const NODE_CLOSE_SCRIPT: &str = r#"
const fs = require("fs"), sock = require("dgram").createSocket("udp4");
sock.bind(0, "127.0.0.1", () => {
  const at = (fd) => { try { return fs.readlinkSync("/proc/self/fd/" + fd); } catch { return ""; } };
  const fd = Number(fs.readdirSync("/proc/self/fd").find((fd) => at(fd).startsWith("socket:")));
  sock.close(() => {
    let file, tries = 0;
    do file = fs.openSync("/proc/self/comm"); while (file !== fd && tries++ < 100);
    const data = Buffer.alloc(100), length = fs.readSync(file, data, 0, 100, null);
    console.log(file === fd, data.toString("utf8", 0, length).trim());
  });
});
"#;

#[test]
fn loopback_files_with_a_closed_sockets_descriptor_are_read() {
    const TEST: &str = "loopback_files_with_a_closed_sockets_descriptor_are_read";
    for (program, word, script, package) in
        [("python3", "-c", PYTHON_CLOSE_SCRIPT, "python3"), ("node", "-e", NODE_CLOSE_SCRIPT, "nodejs")]
    {
        let alone = Command::new(program).args([word, script]).output();
        let why = format!("there is no {program}: apt-get install {package}");
        if !skip::need(TEST, alone.is_ok(), &why) {
            continue;
        }
        let alone = alone.unwrap();
        assert!(stdout(&alone).to_lowercase().starts_with("true"), "{program}: {alone:?}");
        let output = run(&["--quiet", "--", program, word, script]);
        assert_eq!((stdout(&output), stderr(&output)), (stdout(&alone), String::new()), "{program}");
    }
}

#[test]
fn loopback_an_inherited_socket_is_reported_once_received_on() {
    for (script, expected) in [("read line", 1), ("true", 0)] {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let addr = socket.local_addr().unwrap().to_string();
        socket.send_to(b"\n", &addr).unwrap();
        let mut command = Command::new(PROGRAM);
        command.args(["run", "--quiet", "--json-file", "-", "--", "sh", "-c", script]);
        let output = command.stdin(std::os::fd::OwnedFd::from(socket)).output().unwrap();
        let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
        let fallbacks = document["fallbacks"].as_array().unwrap();
        assert_eq!(fallbacks.len(), expected, "{document}");
        for fallback in fallbacks {
            assert_eq!((&fallback["reason"], &fallback["count"]), (&"inherited".into(), &1.into()));
            assert_eq!(fallback["socket"], addr.as_str());
        }
    }
}
