//! `manylane proxy` between servers and their usual clients: curl, wrk, redis-cli, ssh. Both are on
//! one host, and the proxy is on another one, with either stack.

use std::fs::{self, File, Permissions};
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use manylane_test_support::wait_for;
use manylane_testbed::{Host, Layout, Testbed, skip};

use crate::sandbox::Sandbox;
use crate::server::Server;
use crate::{run_ok, words};

/// Ports of the servers and of the proxy.
const SERVER: u16 = 8000;
const PROXY: u16 = 80;

/// Calls `test` with a sandbox for server and clients, the port of the server, and the address of
/// the proxy, for each stack. `start` is the command line of the server.
fn serve(
    name: &str,
    programs: &[(&str, &str)],
    start: impl Fn(&Sandbox, SocketAddr) -> Vec<String>,
    test: impl Fn(&Sandbox, SocketAddr),
) {
    if !skip::need_root(name) || !programs.iter().all(|(program, package)| crate::has(name, program, package))
    {
        return;
    }
    for stack in ["kernel", "xdp"] {
        let testbed = Testbed::new(&Layout { queues: 1, ipv6: false, ..Layout::default() }).unwrap();
        for host in [0, 1] {
            // With it, TCP of Linux 5.10 may hang on a veth device.
            testbed.host(host).set_segmentation(0, false).unwrap();
        }
        let (peers, middle) = (testbed.host(0), testbed.host(1));
        let sandbox = Sandbox::at(&format!("{name}-{stack}"), peers);
        let server = SocketAddr::new(peers.ip(0, false), SERVER);
        let running = Server::start(&sandbox, &start(&sandbox, server), None);
        wait_listening(peers, server);
        let (proxy, at) = start_proxy(&format!("{name}-proxy-{stack}"), middle, stack, server);
        wait_listening(peers, at);
        test(&sandbox, at);
        let (status, _) = proxy.end();
        assert!(status.success(), "{status}");
        drop(running);
    }
}

fn start_proxy(name: &str, host: &Host, stack: &str, server: SocketAddr) -> (Server, SocketAddr) {
    let sandbox = Sandbox::at(name, host);
    let at = SocketAddr::new(host.ip(0, false), PROXY);
    let (listen, to) = (at.to_string(), server.to_string());
    let options =
        ["proxy", "--listen", &listen, "--to", &to, "--stack", stack, "--interface", host.device(0)];
    let more = ["--lanes", "1", "--check-interval", "0", "--drain-timeout", "100ms"];
    let line = [&[env!("CARGO_BIN_EXE_manylane")], &options[..], &more].concat();
    let line: Vec<_> = line.into_iter().map(str::to_owned).collect();
    (Server::start(&sandbox, &line, None), at)
}

fn wait_listening(host: &Host, at: SocketAddr) {
    wait_for("a server that listens", || host.run(|| TcpStream::connect(at).map(drop)), Result::is_ok)
        .unwrap();
}

/// A file of some random bytes there, and its path.
fn data(sandbox: &Sandbox, length: usize) -> String {
    let path = sandbox.path("data");
    let mut bytes = vec![0; length];
    File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
    fs::write(&path, bytes).unwrap();
    path
}

fn is_same(left: impl AsRef<Path>, right: impl AsRef<Path>) -> bool {
    fs::read(left).unwrap() == fs::read(right).unwrap()
}

fn command(sandbox: &Sandbox, program: &str, arguments: &[&str]) -> Command {
    let mut command = sandbox.command(crate::find(program).unwrap());
    command.args(arguments);
    command
}

fn http(sandbox: &Sandbox, at: SocketAddr) -> Vec<String> {
    let script = sandbox.file("http.js", include_str!("programs/http.js"));
    words("node", &[&script, &at.ip().to_string(), &at.port().to_string()])
}

#[test]
fn netns_proxy_curl() {
    let programs = [("node", "nodejs"), ("curl", "curl")];
    serve("netns_proxy_curl", &programs, http, |sandbox, at| {
        let url = format!("http://{at}/");
        let (data, copy) = (data(sandbox, 5_000_000), sandbox.path("copy"));
        let posted = format!("@{data}");
        run_ok(command(
            sandbox,
            "curl",
            &["--silent", "--show-error", "--fail", "--data-binary", &posted, "--output", &copy, &url],
        ));
        assert!(is_same(&data, &copy), "the file has changed");
        // A hundred requests on one connection.
        let urls = format!("{url}?[1-100]");
        let write = ["--silent", "--fail", "--write-out", "%{num_connects}\n", &urls];
        let said = run_ok(command(sandbox, "curl", &write));
        let connects: Vec<_> = said.lines().filter(|line| *line != "hello").collect();
        assert_eq!((said.lines().count(), connects.len()), (200, 100), "{said}");
        assert_eq!(connects.iter().filter(|connects| **connects == "1").count(), 1, "{said}");
    });
}

/// Takes 4 s: wrk counts in whole seconds.
#[test]
fn netns_proxy_wrk() {
    let programs = [("node", "nodejs"), ("wrk", "wrk")];
    serve("netns_proxy_wrk", &programs, http, |sandbox, at| {
        let url = format!("http://{at}/");
        let load = || {
            let said = run_ok(command(sandbox, "wrk", &["-t", "1", "-c", "32", "-d", "1s", &url]));
            assert!(!said.contains("Socket errors") && !said.contains("Non-2xx"), "{said}");
            let requests = said.lines().find_map(|line| line.trim().split_once(" requests in ")).unwrap().0;
            requests.parse::<u32>().unwrap()
        };
        // A machine that is slow enough answers nothing in the first second.
        wait_for("an answer within a second", load, |requests| *requests > 0);
    });
}

#[test]
fn netns_proxy_redis() {
    let programs = [("redis-server", "redis-server"), ("redis-cli", "redis-tools")];
    let start = |sandbox: &Sandbox, at: SocketAddr| {
        let (ip, port, folder) = (at.ip().to_string(), at.port().to_string(), sandbox.path("."));
        let options =
            ["--bind", &ip, "--port", &port, "--dir", &folder, "--save", "", "--protected-mode", "no"];
        words("redis-server", &options)
    };
    serve("netns_proxy_redis", &programs, start, |sandbox, at| {
        let (ip, port) = (at.ip().to_string(), at.port().to_string());
        let ask = |words: &[&str]| {
            let options = [&["-h", &ip, "-p", &port], words].concat();
            run_ok(command(sandbox, "redis-cli", &options))
        };
        assert_eq!(ask(&["set", "key", "value"]), "OK\n");
        assert_eq!(ask(&["get", "key"]), "value\n");
        assert_eq!(ask(&["-r", "1000", "incr", "count"]).lines().last(), Some("1000"));
    });
}

#[test]
fn netns_proxy_ssh() {
    let programs = [("sshd", "openssh-server"), ("ssh", "openssh-client")];
    let start = |sandbox: &Sandbox, at: SocketAddr| {
        // Where sshd has its unprivileged part; usually there once it has run as a service.
        fs::create_dir_all("/run/sshd").unwrap();
        let keys = ["host", "user"].map(|name| sandbox.path(name));
        for key in &keys {
            run_ok(command(sandbox, "ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", key]));
        }
        let allowed = sandbox.path("user.pub");
        fs::set_permissions(&allowed, Permissions::from_mode(0o600)).unwrap();
        let option = |name: &str, value: &str| ["-o".to_owned(), format!("{name}={value}")];
        let options = [
            option("ListenAddress", &at.to_string()),
            option("HostKey", &keys[0]),
            option("AuthorizedKeysFile", &allowed),
            option("StrictModes", "no"),
            option("PidFile", "none"),
            option("PermitRootLogin", "yes"),
        ];
        let mut line = words("sshd", &["-D", "-e", "-f", "/dev/null"]);
        line.extend(options.into_iter().flatten());
        line
    };
    serve("netns_proxy_ssh", &programs, start, |sandbox, at| {
        let (ip, port, key) = (at.ip().to_string(), at.port().to_string(), sandbox.path("user"));
        let (data, copy) = (data(sandbox, 3_000_000), sandbox.path("copy"));
        let known = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"];
        let mut ssh = command(sandbox, "ssh", &["-p", &port, "-i", &key, "-o", "BatchMode=yes"]);
        ssh.args(known.iter().flat_map(|option| ["-o", option]));
        ssh.args(["-l", "root", &ip, &format!("cat > {copy} && echo done")]);
        ssh.stdin(File::open(&data).unwrap());
        assert_eq!(run_ok(ssh), "done\n");
        assert!(is_same(&data, &copy), "the file has changed");
    });
}
