//! `--drop head` with engine `xdp`: what a server gets that comes late to a ring that is more than
//! half full.

use std::process::Command;

use serde_json::Value;

use crate::run_ok;
use crate::server::{Server, wait_for};
use crate::xdp::{OPTIONS, Scene};

/// Of a ring of 1024: more than half, and less than all.
const FRAMES_SENT: u64 = 800;

/// Frames that wait in the one ring that was leased by the launcher `pid`, and for how many there
/// is room.
fn ring(scene: &Scene, pid: u32) -> (u64, u64) {
    let mut top = scene.place.command(env!("CARGO_BIN_EXE_manylane"));
    top.args(["top", "--once", "--json", "--interval", "100ms", &pid.to_string()]);
    let page: Value = serde_json::from_str(&run_ok(top)).unwrap();
    let of = |name: &str| page["settings"]["rings"][0][name].as_u64().unwrap_or(0);
    (of("frames"), of("entries"))
}

/// What the server says that it got, and what the report says was thrown away.
fn run_late(test: &str, options: &[&str]) -> Option<(String, u64, u64)> {
    let scene = Scene::with_queues(test, 1)?;
    let (code, program) = (scene.place.file("late.c", include_str!("late.c")), scene.place.path("late"));
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-Wall", "-Werror", "-o", &program, &code]);
    run_ok(cc);
    let (port, ip) = (scene.addr.port().to_string(), scene.addr.ip().to_string());
    let words = [program, port, ip, scene.place.path("go")];
    let options = [OPTIONS, options].concat();
    let mut server = Server::start(&scene.place, &words, Some(&options));
    scene.warm_up(&mut server);
    scene.ask_until_frames_leave(&mut server);
    assert_eq!(server.answer(&scene.client, scene.addr, b"late"), b"late!");
    let sender = scene.client.socket_at("0.0.0.0:0");
    for number in 0..FRAMES_SENT {
        sender.send_to(format!("n{number}").as_bytes(), scene.addr).unwrap();
    }
    let pid = server.pid();
    wait_for("all frames in the ring", || ring(&scene, pid).0 == FRAMES_SENT);
    let entries = ring(&scene, pid).1;
    scene.place.file("go", "");
    // What comes now would be counted among those that wait.
    wait_for("an empty ring", || ring(&scene, pid).0 == 0);
    let said = String::from_utf8(server.answer(&scene.client, scene.addr, b"tell")).unwrap();
    let (status, report) = server.end();
    assert!(status.success(), "{status}");
    Some((said, report.unwrap().sum("dropped_stale"), entries))
}

#[test]
fn netns_xdp_who_comes_late_gets_the_newest() {
    let Some((said, dropped_stale, entries)) =
        run_late("netns_xdp_who_comes_late_gets_the_newest", &["--drop", "head"])
    else {
        return;
    };
    let rest = entries / 4;
    assert_eq!(said, format!("{rest} from {} to {}, 0 jumps", FRAMES_SENT - rest, FRAMES_SENT - 1));
    assert_eq!(dropped_stale, FRAMES_SENT - rest);
}

#[test]
fn netns_xdp_who_comes_late_gets_all() {
    let Some((said, dropped_stale, _)) = run_late("netns_xdp_who_comes_late_gets_all", &[]) else { return };
    assert_eq!((said, dropped_stale), (format!("{FRAMES_SENT} from 0 to {}, 0 jumps", FRAMES_SENT - 1), 0));
}
