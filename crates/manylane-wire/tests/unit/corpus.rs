//! The corpus of the fuzz target `frame`: written here, and checked in every test run.

use std::fs;
use std::path::PathBuf;

use manylane_wire::ethernet::{Mac, Vlan, ether_type};
use manylane_wire::frame::{Frame, UdpFrame};

use crate::agree::check;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/frame")
}

fn udp(source: &str, destination: &str, payload: &[u8], vlan: Option<Vlan>) -> Vec<u8> {
    let (source, destination) = (source.parse().unwrap(), destination.parse().unwrap());
    let macs = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]));
    let plan =
        UdpFrame { payload, vlans: [vlan, None], ..UdpFrame::new(macs.0, macs.1, source, destination) };
    let mut bytes = vec![0; plan.len()];
    plan.write(&mut bytes).unwrap();
    bytes
}

fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let v4 = udp("10.0.0.1:1000", "10.0.0.2:53", b"hello", None);
    let v6 = udp("[fd77::1]:1000", "[fd77::2]:53", b"hello", None);
    let tag = |ether_type, control| Some(Vlan { ether_type, tci: control });
    let changed = |bytes: &[u8], changes: &[(usize, u8)]| {
        let mut bytes = bytes.to_vec();
        for &(at, byte) in changes {
            bytes[at] = byte;
        }
        bytes
    };
    let mut tagged_twice = udp("10.0.0.1:1", "10.0.0.2:2", b"q", tag(ether_type::SERVICE_VLAN, 7));
    tagged_twice.splice(16..16, [0x81, 0x00, 0xe0, 0x2a]);
    let mut padded = udp("10.0.0.1:1", "10.0.0.2:2", b"", None);
    padded.resize(60, 0);
    let mut options = v4.clone();
    options.splice(34..34, [1, 1, 1, 0]);
    (options[14], options[17]) = (0x46, options[17] + 4);
    vec![
        ("udp4", v4.clone()),
        ("udp4-empty-padded", padded),
        ("udp4-no-checksum", changed(&v4, &[(40, 0), (41, 0)])),
        ("udp4-bad-checksum", changed(&v4, &[(42, b'j')])),
        ("udp4-short-length", changed(&v4, &[(39, 9)])),
        ("udp4-long-length", changed(&v4, &[(39, 200)])),
        ("udp4-vlan", udp("10.0.0.1:1", "10.0.0.2:2", b"v", tag(ether_type::VLAN, 0x602a))),
        ("udp4-two-vlans", tagged_twice),
        ("ip4-options", options),
        ("ip4-fragment", changed(&v4, &[(20, 0x20), (21, 1)])),
        ("ip4-bad-header-length", changed(&v4, &[(14, 0x42)])),
        ("ip4-tcp", changed(&v4, &[(23, 6)])),
        ("udp6", v6.clone()),
        ("udp6-no-checksum", changed(&v6, &[(60, 0), (61, 0)])),
        ("ip6-fragment", changed(&v6, &[(20, 44)])),
        ("ip6-hop-by-hop", changed(&v6, &[(20, 0)])),
        ("ip6-no-length", changed(&v6, &[(19, 0)])),
        ("other-type", changed(&v4, &[(12, 0x88), (13, 0xcc)])),
        ("cut", v4[..30].to_vec()),
    ]
}

#[test]
#[ignore = "writes fuzz/corpus/frame"]
fn write_the_corpus() {
    fs::create_dir_all(folder()).unwrap();
    for (name, bytes) in seeds() {
        fs::write(folder().join(name), bytes).unwrap();
    }
}

#[test]
fn every_file_of_the_corpus_holds() {
    let mut count = 0;
    for file in fs::read_dir(folder()).unwrap() {
        check(&fs::read(file.unwrap().path()).unwrap());
        count += 1;
    }
    assert!(count >= seeds().len());
}

#[test]
fn corpus_seeds_match_their_names() {
    for (name, bytes) in seeds() {
        let frame = Frame::parse(&bytes);
        let udp = frame.as_ref().ok().and_then(Frame::udp).is_some();
        let right = match name {
            "udp4-long-length" | "ip4-bad-header-length" | "ip6-no-length" | "cut" => frame.is_err(),
            _ => frame.is_ok() && udp == (name.starts_with("udp") || name == "ip4-options"),
        };
        assert!(right, "{name}: {frame:?}");
    }
}
