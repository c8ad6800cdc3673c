//! A socket that is dropped leaves nothing open. A program of its own with one test, since
//! descriptors belong to the process.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use manylane::SteeringBackend::{ClassicBpf, Ebpf, Kernel};
use manylane::{Builder, Engine, Steering};
use manylane_tests::lifecycle::{self, open_files};
use manylane_tests::{backends, need_uring};

#[test]
fn loopback_a_dropped_socket_frees_port_and_descriptors() {
    const TEST: &str = "loopback_a_dropped_socket_frees_port_and_descriptors";
    let by = backends(TEST, &[Ebpf, ClassicBpf, Kernel]);
    let by: Vec<_> = by.iter().flat_map(|by| [(*by, Steering::Flow), (*by, Steering::LeastLoaded)]).collect();
    let engines = [Engine::Mmsg, Engine::Uring];
    let engines = engines.into_iter().filter(|engine| *engine == Engine::Mmsg || need_uring(TEST));
    for (engine, (by, steering)) in engines.flat_map(|engine| by.iter().map(move |by| (engine, *by))) {
        let before = open_files();
        let mut builder = Builder::new("127.0.0.1:0").unwrap();
        builder.engine(engine).lanes(3).steering(steering).steering_backend(by);

        lifecycle::drop_unused(builder.open().unwrap(), builder.open().unwrap(), |there| match there {
            true => assert!(open_files().len() >= before.len() + 6),
            false => assert_eq!(open_files(), before, "{by}"),
        });
        lifecycle::open_and_close_lanes(builder.open().unwrap());
        assert_eq!(open_files(), before, "{by}");
        lifecycle::serve_lanes(builder.open().unwrap(), || assert_eq!(open_files(), before, "{by}"));

        // An open that fails half-way: three CPUs that do not exist.
        builder.placement(manylane::Placement::List(vec![5000]));
        assert!(builder.open().is_err());
        assert_eq!(open_files(), before, "{by}");
    }
}
