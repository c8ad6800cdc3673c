//! `manylane proxy`: from its options to the counters at its end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use manylane_test_support::wait_for;
use manylane_testbed::{Layout, Testbed, skip};
use serde_json::Value;

use crate::program::{document, manylane, run, stderr, stdout};

/// A proxy; killed when the test fails.
struct Proxy {
    child: Child,
    addr: SocketAddr,
    /// The line that says which stack it has.
    stack: String,
    log: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let unknown = SocketAddr::from(([0; 4], 0));
        // From here on it is killed on drop, whatever it prints.
        let mut proxy = Self { child, addr: unknown, stack: String::new(), log: Arc::default() };
        let first = lines.next().unwrap().unwrap();
        let addr = first.strip_prefix("listening on ").unwrap_or_else(|| panic!("{first}"));
        proxy.addr = addr.parse().unwrap();
        proxy.stack = lines.next().unwrap().unwrap();
        // Read on, because the program would block on a full pipe.
        let log = Arc::clone(&proxy.log);
        thread::spawn(move || lines.map_while(Result::ok).for_each(|line| log.lock().unwrap().push(line)));
        proxy
    }

    /// What it serves for Prometheus.
    fn metrics(&self) -> String {
        let line = || self.log.lock().unwrap().iter().find(|line| line.contains("metrics at")).cloned();
        let line = wait_for("the address of metrics", line, Option::is_some).unwrap();
        let port = line.rsplit_once(':').unwrap().1.trim_end_matches("/metrics").parse().unwrap();
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        page
    }

    /// Sends it SIGHUP, and waits for a line that has this text.
    fn reload(&self, answer: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", "HUP", &pid]).status().unwrap().success());
        let log = || self.log.lock().unwrap().clone();
        wait_for("a line about the reload", log, |log| log.iter().any(|line| line.contains(answer)));
    }

    /// Ends it by SIGTERM; returns its counters.
    fn end(mut self) -> Value {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", "TERM", &pid]).status().unwrap().success());
        let end = || (self.child.try_wait().unwrap(), &self.log);
        let (status, _) = wait_for("the end of proxy (status, log)", end, |(status, _)| status.is_some());
        assert_eq!(status.unwrap().code(), Some(0));
        let mut text = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        document(&text)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server that answers each connection with what it has read, until its end.
fn answer_all(listener: TcpListener) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            thread::spawn(move || {
                let mut bytes = Vec::new();
                // The checks of the proxy connect and close.
                if stream.read_to_end(&mut bytes).is_ok() {
                    _ = stream.write_all(&bytes);
                }
            });
        }
    });
}

fn ask(addr: SocketAddr, text: &str) -> String {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn loopback_proxy_serves_until_it_is_told_to_end() {
    let servers = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let to = servers.each_ref().map(|server| server.local_addr().unwrap().to_string()).join(",");
    servers.into_iter().for_each(answer_all);
    let words = ["proxy", "--listen", "127.0.0.1:0", "--to", &to, "--lanes", "2", "--json"];
    let proxy = Proxy::start(manylane(&[&words[..], &["--metrics", "127.0.0.1:0"]].concat()));
    assert_eq!(proxy.stack, "stack kernel, 2 lanes");
    for at in 0..20 {
        let text = format!("request {at}");
        assert_eq!(ask(proxy.addr, &text), text);
    }
    let page = proxy.metrics();
    assert!(page.contains("manylane_proxy_accepted_total 20\n"), "{page}");
    let of_lane =
        |name: &str, lane| format!("{name}{{socket=\"{}\",stack=\"kernel\",lane=\"{lane}\"}} ", proxy.addr);
    for name in ["manylane_proxy_lane_accepted_total", "manylane_proxy_stack_memory_max_bytes"] {
        assert_eq!(page.matches(&format!("# TYPE {name} ")).count(), 1, "{page}");
        assert!(page.contains(&of_lane(name, 0)) && page.contains(&of_lane(name, 1)), "{page}");
    }
    assert_eq!(page.matches("manylane_proxy_server_up{server=").count(), 2, "{page}");
    let document = proxy.end();
    assert_eq!(document["schema"], "manylane.proxy.v1");
    let total = &document["rows"][0];
    for (name, count) in [("accepted", 20), ("connected", 20), ("finished", 20), ("open", 0)] {
        assert_eq!(total[name], count, "{name}: {total}");
    }
    let lanes = total["lanes"].as_array().unwrap();
    assert_eq!(lanes.iter().map(|lane| lane["accepted"].as_u64().unwrap()).sum::<u64>(), 20, "{total}");
    assert_eq!((lanes.len(), &lanes[1]["stack"]["connections"]), (2, &0.into()), "{total}");
}

/// `manylane top` shows each lane with its connections.
#[test]
fn loopback_top_shows_the_lanes_of_a_proxy() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = server.local_addr().unwrap().to_string();
    answer_all(server);
    let words = ["proxy", "--listen", "127.0.0.1:0", "--to", &to, "--lanes", "2", "--max-memory", "1M"];
    let proxy = Proxy::start(manylane(&[&words[..], &["--json"]].concat()));
    let mut client = TcpStream::connect(proxy.addr).unwrap();
    client.write_all(b"question").unwrap();
    let top = |more: &[&str]| {
        let pid = proxy.child.id().to_string();
        let output = run(&[&["top", "--interval", "50ms", &pid], more].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stdout(&output)
    };
    let sum = |rows: &Value, name: &str| -> u64 {
        rows.as_array().unwrap().iter().map(|row| row["tcp"][name].as_u64().unwrap()).sum()
    };
    let rows = || document(&top(&["--json"]))["rows"].clone();
    let rows = wait_for("rows with a connection", rows, |rows| sum(rows, "bytes_to_servers") == 8);
    assert_eq!((rows.as_array().unwrap().len(), sum(&rows, "open")), (2, 1), "{rows}");
    assert_eq!(sum(&rows, "memory_max_bytes"), 1 << 20, "{rows}");
    for row in rows.as_array().unwrap() {
        assert_eq!((&row["engine"], &row["socket"]), (&"tcp/kernel".into(), &proxy.addr.to_string().into()));
        assert!(row["thread"].is_u64() && row["cpu"].is_number(), "{row}");
    }
    let text = top(&["--once"]);
    assert_eq!(text.matches(&format!("connections of {} lane ", proxy.addr)).count(), 2, "{text}");
    // The kernel's stack has no filter.
    let output = run(&["limit", &proxy.child.id().to_string()]);
    assert!(stderr(&output).contains("engine xdp"), "{}", stderr(&output));
    drop(client);
    assert_eq!(proxy.end()["rows"][0]["finished"], 1);
}

/// A server that says its name.
fn say(name: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            _ = stream.and_then(|mut stream| stream.write_all(name.as_bytes()));
        }
    });
    address
}

#[test]
fn loopback_proxy_reads_its_file_again() {
    let folder = crate::program::folder("proxy_config");
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("proxy.toml");
    let write = |server: &str, more: &str| {
        let text = format!("listen = [\"127.0.0.1:0\"]\nto = [\"{server}\"]\n{more}\n");
        std::fs::write(&file, text).unwrap();
    };
    let [one, two] = ["one", "two"].map(|name| say(name).to_string());
    write(&one, "check-interval = \"0\"");
    let proxy = Proxy::start(manylane(&["proxy", "--json", "--config", file.to_str().unwrap()]));
    let answer = || {
        let mut stream = TcpStream::connect(proxy.addr).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert_eq!(answer(), "one");
    write(&two, "check-interval = \"0\"\nlanes = 7");
    proxy.reload("lanes has changed");
    // Lanes notice within a moment.
    wait_for("an answer of the new server", answer, |answer| answer == "two");
    write(&one, "idle-timeout = \"soon\"");
    proxy.reload("not reloaded");
    assert!(proxy.log.lock().unwrap().iter().any(|line| line.contains("line 3")));
    assert_eq!(answer(), "two");
    let document = proxy.end();
    assert_eq!(document["rows"][0]["no_server"], 0, "{document}");
    _ = std::fs::remove_dir_all(folder);
}

#[test]
fn loopback_proxy_names_what_is_wrong() {
    for (words, why) in [
        (&["--listen", "127.0.0.1:0", "--to", "x"][..], "invalid socket address"),
        (&["--listen", "127.0.0.1:0", "--to", "127.0.0.1:1", "--balance", "luck"], "least-connections"),
        (&["--listen", "127.0.0.1:0", "--to", "127.0.0.1:1", "--source-ports", "9-1"], "49152-65535"),
    ] {
        let output = run(&[&["proxy"], words].concat());
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let output = run(&["proxy", "--listen", &addr, "--to", "127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot listen"), "{}", stderr(&output));
}

/// A UDP server that answers with its name, until the process ends.
fn say_by_udp(name: &'static str) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        while let Ok((_, peer)) = socket.recv_from(&mut [0; 2048]) {
            _ = socket.send_to(name.as_bytes(), peer);
        }
    });
    address
}

/// Asks by a socket of its own, and so in a session of its own.
fn ask_by_udp(addr: SocketAddr, text: &str) -> String {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
    socket.connect(addr).unwrap();
    socket.send(text.as_bytes()).unwrap();
    let mut answer = [0; 2048];
    let len = socket.recv(&mut answer).unwrap();
    String::from_utf8_lossy(&answer[..len]).into_owned()
}

#[test]
fn loopback_udp_proxy_serves_until_it_is_told_to_end() {
    let to = ["one", "two"].map(|name| say_by_udp(name).to_string()).join(",");
    let words = ["proxy", "--udp", "--listen", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--to", &to];
    let more = ["--engine", "mmsg", "--lanes", "1", "--answers", "1", "--json", "--metrics", "127.0.0.1:0"];
    let proxy = Proxy::start(manylane(&[&words[..], &more].concat()));
    // The line behind the first address has the second one.
    let second = proxy.stack.strip_prefix("listening on ").unwrap().parse().unwrap();
    let answers: Vec<String> =
        (0..10).map(|at| ask_by_udp(if at % 2 == 0 { proxy.addr } else { second }, "question")).collect();
    assert_eq!(answers, ["one", "two"].repeat(5));
    let page = proxy.metrics();
    assert!(page.contains("manylane_proxy_udp_forwarded_total 10\n"), "{page}");
    assert_eq!(page.matches("manylane_proxy_server_up{server=").count(), 2, "{page}");
    assert_eq!(page.matches("manylane_lanes{").count(), 2, "{page}");
    let document = proxy.end();
    assert_eq!(document["schema"], "manylane.proxy.v1");
    assert_eq!(document["settings"]["engine"], "mmsg");
    let total = &document["rows"][0];
    for (name, count) in [("datagrams", 10), ("answers_sent", 10), ("finished", 10), ("open", 0)] {
        assert_eq!(total[name], count, "{name}: {total}");
    }
}

#[test]
fn loopback_udp_proxy_reads_its_file_again() {
    let folder = crate::program::folder("udp_proxy_config");
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("proxy.toml");
    let write = |server: &str, more: &str| {
        let text = format!("udp = true\nlisten = [\"127.0.0.1:0\"]\nto = [\"{server}\"]\n{more}\n");
        std::fs::write(&file, text).unwrap();
    };
    let [one, two] = ["one", "two"].map(|name| say_by_udp(name).to_string());
    write(&one, "key = \"0:4\"");
    let proxy = Proxy::start(manylane(&["proxy", "--json", "--config", file.to_str().unwrap()]));
    assert!(
        proxy.stack.starts_with("udp, engine mmsg") && proxy.stack.contains("key 0:4"),
        "{}",
        proxy.stack
    );
    assert_eq!(ask_by_udp(proxy.addr, "key-"), "one");
    write(&two, "key = \"0:8\"");
    proxy.reload("key has changed");
    let mut at = 0;
    let answer = || {
        at += 1;
        ask_by_udp(proxy.addr, &format!("{at:04}"))
    };
    // Lanes notice within a moment.
    wait_for("an answer of the new server", answer, |answer| answer == "two");
    assert_eq!(ask_by_udp(proxy.addr, "key-"), "one");
    write(&one, "half-closed-timeout = \"5s\"");
    proxy.reload("half-closed-timeout: does not apply with udp = true");
    let document = proxy.end();
    assert_eq!(document["rows"][0]["too_short"], 0, "{document}");
    assert_eq!(document["settings"]["key"], "0:4");
    _ = std::fs::remove_dir_all(folder);
}

#[test]
fn loopback_udp_proxy_names_options_that_do_not_apply() {
    for (words, option) in [
        (&["--udp", "--proxy-protocol", "v2"][..], "--proxy-protocol"),
        (&["--udp", "--stack", "kernel"], "--stack"),
        (&["--udp", "--source-ports", "50000-60000"], "--source-ports"),
        (&["--udp", "--connect-timeout", "1s"], "--connect-timeout"),
        (&["--udp", "--max-memory", "1G"], "--max-memory"),
        (&["--udp", "--rx-usecs", "100"], "--rx-usecs"),
        (&["--rx-usecs", "20001"], "20000"),
        (&["--udp", "--half-closed-timeout", "1s"], "--half-closed-timeout"),
        (&["--udp", "--key", "1:65"], "OFFSET:LENGTH"),
        (&["--key", "1:8"], "--udp"),
        (&["--engine", "mmsg"], "--udp"),
        (&["--answers", "1"], "--udp"),
    ] {
        let output = run(&[&["proxy", "--listen", "127.0.0.1:0", "--to", "127.0.0.1:1"], words].concat());
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(stderr(&output).contains(option), "{}", stderr(&output));
    }
    let words = ["--engine", "xdp", "--key", "1:8", "--lanes", "2"];
    let output =
        run(&[&["proxy", "--udp", "--listen", "127.0.0.1:0", "--to", "127.0.0.1:1"], &words[..]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("--lanes 1"), "{}", stderr(&output));
}

/// A proxy on TCP lanes of the second host, to a server on the first one.
fn start_in(testbed: &Testbed, listen: &str, to: &str) -> Proxy {
    let host = testbed.host(1);
    let words = ["--listen", listen, "--to", to, "--interface", host.device(0), "--json"];
    let program = manylane(&[]).get_program().to_owned();
    let mut command = host.command(program).unwrap();
    command.arg("proxy").args(words).args(["--check-interval", "50ms"]);
    let proxy = Proxy::start(command);
    assert!(proxy.stack.starts_with("stack xdp, "), "{}", proxy.stack);
    proxy
}

/// With a stack of its own, and servers that are checked by the kernel's beside it.
#[test]
fn netns_proxy_has_a_stack_of_its_own() {
    if !skip::need_root("netns_proxy_has_a_stack_of_its_own") {
        return;
    }
    let testbed = Testbed::new(&Layout { queues: 2, ..Layout::default() }).unwrap();
    let (peer, host) = (testbed.host(0), testbed.host(1));
    let server = peer.run(|| TcpListener::bind((peer.ip(0, false), 0)).unwrap());
    let to = server.local_addr().unwrap().to_string();
    peer.run(|| answer_all(server));
    let proxy = start_in(&testbed, &format!("{}:0", host.ip(0, false)), &to);
    let text = "x".repeat(100_000);
    for _ in 0..5 {
        assert!(peer.run(|| ask(proxy.addr, &text)) == text);
    }
    let program = manylane(&[]).get_program().to_owned();
    let pid = proxy.child.id().to_string();
    let outside = |words: &[&str]| host.command(&program).unwrap().args(words).output().unwrap();
    let rows = || document(&stdout(&outside(&["top", "--json", "--interval", "50ms"])))["rows"].clone();
    let all_segments = |rows: &Value| {
        let rows = rows.as_array().unwrap();
        // 5 times 100,000 bytes in both directions on two connections, at most 1448 in a segment.
        let segments: u64 = rows.iter().map(|row| row["delivered"].as_u64().unwrap()).sum();
        rows.len() == 2 && segments > 690
    };
    let rows = wait_for("rows with segments", rows, all_segments);
    assert_eq!((&rows[0]["engine"], rows[0]["tcp"]["open"].is_u64()), (&"tcp/xdp".into(), true), "{rows}");
    // Its filter can be changed, as that of UDP lanes.
    let output = outside(&["limit", &pid, "--deny", "203.0.113.0/24"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document = proxy.end();
    let total = &document["rows"][0];
    for (name, count) in [("accepted", 5), ("finished", 5), ("bytes_to_clients", 500_000)] {
        assert_eq!(total[name], count, "{name}: {total}");
    }
    for lane in total["lanes"].as_array().unwrap() {
        let stack = &lane["stack"];
        let bytes = stack["buffers"].as_u64().unwrap() * (128 << 10);
        assert!(bytes <= stack["memory_max_bytes"].as_u64().unwrap(), "{lane}");
        assert_eq!((&stack["connections"], &stack["dropped_checksum"]), (&0.into(), &0.into()), "{lane}");
    }
}

/// Clients of a proxy that was killed get a reset with their next packet, and the next process has
/// the address.
#[test]
fn netns_proxy_that_was_killed_is_followed_by_another_one() {
    if !skip::need_root("netns_proxy_that_was_killed_is_followed_by_another_one") {
        return;
    }
    let testbed = Testbed::new(&Layout { queues: 1, ..Layout::default() }).unwrap();
    let (peer, host) = (testbed.host(0), testbed.host(1));
    let server = peer.run(|| TcpListener::bind((peer.ip(0, false), 0)).unwrap());
    let to = server.local_addr().unwrap().to_string();
    peer.run(|| answer_all(server));
    let listen = format!("{}:4281", host.ip(0, false));
    let mut proxy = start_in(&testbed, &listen, &to);
    let mut client = peer.run(|| TcpStream::connect(proxy.addr).unwrap());
    client.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
    client.write_all(b"some").unwrap();
    proxy.child.kill().unwrap();
    proxy.child.wait().unwrap();
    let next = start_in(&testbed, &listen, &to);
    // The next process knows as little of the connection as the kernel would.
    // A reset that is there before the write is told by it, and the read then finds the end.
    let told = client.write_all(b"more").and_then(|()| client.read(&mut [0; 8]));
    assert_eq!(told.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(peer.run(|| ask(next.addr, "again")), "again");
    assert_eq!(next.end()["rows"][0]["finished"], 1);
}

/// An address that several proxies have is on the loopback device, and routers send its packets to
/// the machine.
#[test]
fn netns_proxy_serves_an_address_of_the_loopback_device() {
    if !skip::need_root("netns_proxy_serves_an_address_of_the_loopback_device") {
        return;
    }
    let testbed = Testbed::new(&Layout { queues: 1, ..Layout::default() }).unwrap();
    let (peer, host) = (testbed.host(0), testbed.host(1));
    let ip = |host: &manylane_testbed::Host, words: &[&str]| {
        assert!(host.command("ip").unwrap().args(words).status().unwrap().success(), "{words:?}");
    };
    ip(host, &["addr", "add", "198.51.100.7/32", "dev", "lo"]);
    ip(peer, &["route", "add", "198.51.100.7/32", "via", &host.ip(0, false).to_string()]);
    let server = peer.run(|| TcpListener::bind((peer.ip(0, false), 0)).unwrap());
    let to = server.local_addr().unwrap().to_string();
    peer.run(|| answer_all(server));
    let proxy = start_in(&testbed, "198.51.100.7:443", &to);
    let text = "x".repeat(100_000);
    assert!(peer.run(|| ask(proxy.addr, &text)) == text);
    assert_eq!(proxy.end()["rows"][0]["finished"], 1);
}
