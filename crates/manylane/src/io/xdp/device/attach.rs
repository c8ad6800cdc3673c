//! Attaches the XDP program to a device; errors name what to change.

use std::thread;
use std::time::{Duration, Instant};

use aya::Ebpf;
use aya::programs::{Xdp, XdpMode, loaded_programs};
use manylane_sys::errno::{EBUSY, EEXIST, ENOSPC, EOPNOTSUPP};

use super::AttachMode;
use crate::bpf_load::{bpf_error, load_with_retry};
use crate::error::{Error, ErrorKind, Result, errno_of};
use crate::io::xdp::route;

/// Loads the program and attaches it to the device with this index, name and driver. Waits for at
/// most `timeout` until another program is detached.
pub(super) fn attach_program(
    program: &mut Ebpf,
    index: u32,
    (name, driver): (&str, &str),
    attach: AttachMode,
    timeout: Duration,
) -> Result<()> {
    let start = Instant::now();
    let mode = match attach {
        AttachMode::Native => XdpMode::Driver,
        AttachMode::Generic => XdpMode::Skb,
    };
    let mut last = None;
    // The first entry supports frames in several buffers, which jumbo MTUs need. Kernels before
    // Linux 5.18 do not know it.
    for entry in ["ml_take_pieces", "ml_take"] {
        let missing =
            || Error::new(ErrorKind::Unsupported, format!("the eBPF object has no program {entry}"));
        let program: &mut Xdp = program
            .program_mut(entry)
            .ok_or_else(missing)?
            .try_into()
            .map_err(|err| bpf_error(name, "unexpected type of the eBPF program for XDP", err))?;
        let mut tried =
            load_with_retry(|| program.load()).and_then(|()| program.attach_to_if_index(index, mode));
        while start.elapsed() < timeout
            && tried.as_ref().is_err_and(|err| matches!(errno_of(err), Some(EBUSY | EEXIST)))
        {
            thread::sleep(Duration::from_millis(2));
            tried = program.attach_to_if_index(index, mode);
        }
        match tried {
            Ok(_) => return Ok(()),
            Err(err) => {
                if matches!(errno_of(&err), Some(EBUSY | EEXIST)) {
                    let message = format!(
                        "{name}: {} is already attached (to see it: 'ip link show dev {name}'; to detach it, unless a process holds it: 'ip link set dev {name} xdp off')",
                        describe_program(index)
                    );
                    return Err(Error::with(ErrorKind::InUse, message, err));
                }
                last = Some(err);
            }
        }
    }
    let advice = match (attach, last.as_ref().and_then(|err| errno_of(err))) {
        // Reported by the driver of a veth pair.
        (AttachMode::Native, Some(ENOSPC)) => {
            "the other end of this veth pair has more send queues than this end has receive queues: add queues here, or remove some there ('ethtool -L')"
        }
        (AttachMode::Native, Some(EOPNOTSUPP)) if driver == "virtio_net" => {
            "the host passes frames with partial checksums and segments, which this machine cannot turn off: on the host, enable ctrl_guest_offloads for the network device, or disable its guest_csum, guest_tso4, guest_tso6, guest_ecn and guest_ufo"
        }
        (AttachMode::Native, _) => {
            "its driver accepts no XDP program (xdp_generic(true) works on any device), or CAP_BPF or CAP_NET_ADMIN is missing"
        }
        (AttachMode::Generic, _) => "XDP needs CAP_BPF, CAP_NET_ADMIN and Linux 5.9",
    };
    match last {
        Some(err) => Err(bpf_error(name, advice, err)),
        None => Err(Error::new(ErrorKind::Unsupported, format!("{name}: {advice}"))),
    }
}

/// Describes the program on a device, as far as visible: its name needs `CAP_SYS_ADMIN`.
fn describe_program(index: u32) -> String {
    let Some(number) = route::xdp_program_id(index) else { return "another XDP program".into() };
    let program =
        loaded_programs().filter_map(std::result::Result::ok).find(|program| program.id() == number);
    let name = program.as_ref().and_then(|program| program.name_as_str()).filter(|name| !name.is_empty());
    match name {
        Some(name) => format!("the XDP program {name} (number {number})"),
        None => format!("another XDP program (number {number})"),
    }
}
