//! Sockets that were bound before the program started: by systemd, by inetd, by the parent
//! process. They stay the kernel's. The report says so once the program receives on them.

use std::sync::atomic::Ordering;

use libc::c_int;
use manylane_ipc::report::Reason;

use crate::base::{quiesce, real, sockopt, state};
use crate::fds::table::{self, Entry};
use crate::fds::{identity, lane_socket};
use crate::group::socket_end;
use crate::shared::report;
use crate::shared::sock::{PLAIN, Shared, Sock};

/// Registers the UDP sockets that exist at start; once. Not needed without a report.
pub(crate) fn find() {
    if !report::is_open() {
        return;
    }
    let Ok(all) = std::fs::read_dir("/proc/self/fd") else { return };
    all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).for_each(register);
}

fn register(fd: c_int) {
    let is_udp = sockopt::int_option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Some(libc::IPPROTO_UDP);
    let port = || lane_socket::local_addr(fd).map(|addr| addr.port()).filter(|port| *port != 0);
    let is_allowed = |port: u16| state::settings().is_some_and(|settings| settings.allows_port(port));
    if table::entry(fd) != Entry::None || !is_udp || !port().is_some_and(is_allowed) {
        return;
    }
    let Some(sock) = Sock::alloc(identity::cookie(fd)) else { return };
    let Some(shared) = sock.map_shared() else { return socket_end::release_slot(sock) };
    shared.inherited.store(1, Ordering::Relaxed);
    shared.mode.store(PLAIN, Ordering::Release);
    if table::set(fd, Entry::Sock(sock.index())).is_none() {
        socket_end::release_slot(sock);
    }
}

/// The program receives on a plain socket: reports it if it was inherited.
#[inline]
pub(crate) fn report_inherited(shared: &Shared, fd: c_int) {
    if shared.inherited.load(Ordering::Relaxed) != 0 {
        quiesce::run_inside(|| report_inherited_now(shared, fd));
    }
}

#[cold]
fn report_inherited_now(shared: &Shared, fd: c_int) {
    let errno = real::errno();
    if shared.inherited.swap(0, Ordering::Relaxed) != 0 {
        report::count_socket();
        report::count_reason(Reason::Inherited, lane_socket::local_addr(fd));
    }
    real::set_errno(errno);
}
