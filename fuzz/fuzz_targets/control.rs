//! Control messages as the kernel hands them over: whatever the bytes, parsing ends, does not
//! panic, and finds nothing that is not there.
#![no_main]

use libfuzzer_sys::fuzz_target;
use manylane_sys::control::{self, Ancillary};

fuzz_target!(|bytes: &[u8]| {
    let found = control::parse(bytes);
    // Less than a header is nothing.
    if bytes.len() < 16 {
        assert_eq!(found, Ancillary::default());
    }
    // What is found once is found in a longer buffer too, unless the rest says otherwise: an empty
    // rest cannot.
    assert_eq!(control::parse(bytes), found);
    if let Some(source) = found.local {
        let octets = match source.ip {
            std::net::IpAddr::V4(ip) => ip.octets().to_vec(),
            std::net::IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        assert!(bytes.windows(octets.len()).any(|window| window == octets));
    }
    if let Some(tos) = found.tos {
        assert!(bytes.contains(&tos));
    }
});
