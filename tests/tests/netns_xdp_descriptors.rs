//! A socket of engine xdp that is dropped leaves nothing open: no descriptor, no port, no program,
//! no thread. A program of its own with one test, since descriptors belong to the process.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::fs;

use manylane::{Engine, Placement};
use manylane_test_support::wait_for;
use manylane_tests::Variant;
use manylane_tests::lifecycle::{self, open_files};

/// Open descriptors, and the number of threads.
fn open_resources() -> (Vec<String>, usize) {
    let mut files = open_files();
    // The numbers of sockets differ from one to the next.
    for file in &mut files {
        file.truncate(file.find('[').unwrap_or(file.len()));
    }
    files.sort();
    (files, fs::read_dir("/proc/self/task").unwrap().count())
}

/// The thread that follows the kernel's routes ends a moment after its socket.
fn wait_restored(before: &(Vec<String>, usize)) {
    wait_for(&format!("the resources of before: {before:#?}"), open_resources, |now| now == before);
}

fn check(variant: &Variant) {
    let mut builder = variant.builder("127.0.0.1:0");
    builder.lanes(3);
    // Resources that the first socket creates for good are not counted for later ones.
    drop(builder.open().unwrap());
    let before = wait_for("the end of its threads", open_resources, |(_, threads)| *threads <= 3);

    // Two at once share the device.
    lifecycle::drop_unused(builder.open().unwrap(), builder.open().unwrap(), |there| match there {
        true => assert!(open_resources().0.len() >= before.0.len() + 6 + 4),
        false => wait_restored(&before),
    });
    lifecycle::open_and_close_lanes(builder.open().unwrap());
    wait_restored(&before);
    lifecycle::serve_lanes(builder.open().unwrap(), || wait_restored(&before));

    // Opens that fail: half-way through the lanes, and half-way through the queues.
    assert!(builder.placement(Placement::List(vec![5000])).open().is_err());
    builder.placement(Placement::Spread);
    assert!(builder.lanes(9).xdp_surplus_lanes(false).open().is_err());
    wait_restored(&before);
}

#[test]
fn netns_xdp_a_dropped_socket_leaves_nothing_open() {
    Variant::new("netns_xdp_a_dropped_socket_leaves_nothing_open", Engine::Xdp, 4).run(check);
}
