//! Settings that cannot work are refused.

use manylane_tcp::time::Time;
use manylane_tcp::{Config, Error, Secret, Stack};

fn refusal(change: impl FnOnce(&mut Config)) -> Option<Error> {
    let mut config = Config::default();
    change(&mut config);
    Stack::new(config, Secret::new([1; 16]), Time(0)).err()
}

#[test]
fn settings_out_of_range_are_named() {
    let names = |error: Option<Error>, name: &str| error.unwrap().to_string().contains(name);
    assert!(names(refusal(|config| config.receive_buffer = 0), "receive_buffer"));
    assert!(names(refusal(|config| config.receive_buffer = (1 << 30) + 1), "receive_buffer"));
    assert!(names(refusal(|config| config.send_buffer = 0), "send_buffer"));
    assert!(names(refusal(|config| config.mtu = 575), "mtu"));
    assert!(names(refusal(|config| config.connections_max = usize::MAX), "connections_max"));
    assert!(names(refusal(|config| config.time_wait_max = usize::MAX), "time_wait_max"));
    assert!(refusal(|config| config.receive_buffer = 1 << 30).is_none());
    assert!(
        refusal(|config| (config.connections_max, config.backlog, config.buffers_max) = (0, 0, 0)).is_none()
    );
}
