//! The report of the preload library: the Rust side of `abi/manylane_report.h`, and the file behind
//! it.
//!
//! The launcher makes the file ([`ReportFile::create`]) and reads it. The library maps it in its
//! constructor ([`ReportFile::find`]). A slot is claimed by compare-and-exchange; after that only
//! its owner writes it.
//!
//! The file is in memory, unnamed, and sealed: its size is fixed, so that no access to the mapping
//! fails in any of the processes. Its content is untrusted: any process that has mapped it can
//! write it.

mod reason;

use std::fs::OpenOptions;
use std::io;
use std::mem::{offset_of, size_of};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use manylane_sys::shared::Shared;
use manylane_sys::{atomics, fd};

pub use self::reason::Reason;

/// First word of a report.
pub const MAGIC: u32 = 0x4853_4c4d;
/// Version of the layout.
pub const VERSION: u32 = 4;
/// Number of receiver slots.
pub const RECEIVERS: usize = 1024;
/// Number of reason slots.
pub const REASONS: usize = 32;
/// Instead of a lane's number: the receiver uses the program's own socket.
pub const NO_LANE: u32 = u32::MAX;

/// State of a slot: free.
pub const FREE: u32 = 0;
/// State of a slot: being filled.
pub const CLAIMED: u32 = 1;
/// State of a slot: in use.
pub const OPEN: u32 = 2;
/// State of a slot: its receiver ended; the counts stay until the slot is reused.
pub const ENDED: u32 = 3;

/// Passes the counters of a receiver to the macro `$then`: the documentation of each, which is also
/// its help in metrics, and its name in [`Receiver`], JSON and metrics.
#[macro_export]
macro_rules! receiver_counters {
    ($then:ident) => {
        $then! {
            /// Datagrams returned to the program.
            delivered;
            /// Bytes of the datagrams returned to the program.
            delivered_bytes;
            /// Receive calls that returned datagrams. A prefetched datagram needs none.
            batches;
            /// Delivered datagrams that were in the lane of another thread.
            delivered_from_other_lanes;
            /// Delivered datagrams that bypassed the kernel's stack (engine xdp).
            delivered_by_bypass;
            /// Frames that were dropped because they were malformed or had a wrong checksum (engine
            /// xdp).
            bad_frames;
            /// Datagrams sent.
            sent;
            /// Bytes of the datagrams sent.
            sent_bytes;
            /// Calls for sending. Replies that are sent together need one.
            send_calls;
            /// Sent datagrams that bypassed the kernel's stack (engine xdp).
            sent_by_bypass;
        }
    };
}

macro_rules! receiver {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        atomics! {
            /// A thread that receives on a socket (`struct mls_receiver`). Only that thread writes
            /// it.
            pub struct Receiver {
                /// [`FREE`], [`CLAIMED`], [`OPEN`] or [`ENDED`].
                pub state: AtomicU32,
                /// Its process.
                pub pid: AtomicU32,
                /// Its thread.
                pub tid: AtomicU32,
                /// Its current lane; [`NO_LANE`] if none.
                pub lane: AtomicU32,
                /// The address that the socket is bound to.
                pub addr: Addr,
                $($(#[$doc])* pub $name: AtomicU64,)*
                /// Inode of its lane's kernel socket, as in `/proc/PID/fd` and `/proc/net/udp`; 0
                /// if it is not known.
                pub inode: AtomicU64,
            }
        }

        impl Receiver {
            /// Sets all counters to 0.
            pub fn clear(&self) {
                $(self.$name.store(0, Ordering::Relaxed);)*
            }
        }
    };
}

receiver_counters!(receiver);

atomics! {
    /// A bound address (`struct mls_addr`).
    pub struct Addr {
        family: AtomicU16,
        port: AtomicU16,
        pad: AtomicU32,
        ip: [AtomicU8; 16],
    }

    /// Global fields (`struct mls_header`).
    pub struct Header {
        /// [`MAGIC`].
        pub magic: AtomicU32,
        /// [`VERSION`].
        pub version: AtomicU32,
        /// [`RECEIVERS`].
        pub receivers: AtomicU32,
        /// [`REASONS`].
        pub reasons: AtomicU32,
        /// Processes that loaded the library, or were forked by one that had.
        pub processes: AtomicU32,
        /// The last of these processes.
        pub last_pid: AtomicU32,
        /// Receivers that found no slot.
        pub full: AtomicU32,
        /// UDP sockets bound to a port that the library handles.
        pub sockets: AtomicU32,
        pad: [AtomicU64; 4],
    }

    /// Count of a reason for which sockets became plain ones (`struct mls_reason`).
    pub struct ReasonSlot {
        /// The count.
        pub count: AtomicU64,
        /// The last process.
        pub last_pid: AtomicU32,
        pad: AtomicU32,
        /// The last socket's address.
        pub last_addr: Addr,
        pad1: [AtomicU64; 3],
    }

    /// The whole file (`struct mls_report`).
    pub struct Report {
        /// Global fields.
        pub header: Header,
        /// Indexed by [`Reason`].
        pub reasons: [ReasonSlot; REASONS],
        /// Receivers, in the order in which they started.
        pub receivers: [Receiver; RECEIVERS],
    }
}

const _: () = assert!(size_of::<Addr>() == 24);
const _: () = assert!(size_of::<Header>() == 64);
const _: () = assert!(offset_of!(Header, processes) == 16);
const _: () = assert!(offset_of!(Header, sockets) == 28);
const _: () = assert!(size_of::<ReasonSlot>() == 64);
const _: () = assert!(offset_of!(ReasonSlot, last_addr) == 16);
const _: () = assert!(size_of::<Receiver>() == 128);
const _: () = assert!(offset_of!(Receiver, addr) == 16);
const _: () = assert!(offset_of!(Receiver, delivered) == 40);
const _: () = assert!(offset_of!(Receiver, delivered_from_other_lanes) == 64);
const _: () = assert!(offset_of!(Receiver, sent_by_bypass) == 112);
const _: () = assert!(offset_of!(Receiver, inode) == 120);
const _: () = assert!(offset_of!(Report, receivers) == 64 + 64 * REASONS);
const _: () = assert!(Reason::ALL.len() <= REASONS);

impl Addr {
    /// Writes `addr`.
    pub fn set(&self, addr: &SocketAddr) {
        let mut bytes = [0; 16];
        match addr.ip() {
            IpAddr::V4(ip) => bytes[..4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => bytes = ip.octets(),
        }
        for (to, from) in self.ip.iter().zip(bytes) {
            to.store(from, Ordering::Relaxed);
        }
        self.port.store(addr.port().to_be(), Ordering::Relaxed);
        let family = if addr.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        self.family.store(u16::try_from(family).unwrap_or(0), Ordering::Relaxed);
    }

    /// The address; none if it was never written.
    #[must_use]
    pub fn read(&self) -> Option<SocketAddr> {
        let mut bytes = [0; 16];
        for (to, from) in bytes.iter_mut().zip(&self.ip) {
            *to = from.load(Ordering::Relaxed);
        }
        let port = u16::from_be(self.port.load(Ordering::Relaxed));
        match i32::from(self.family.load(Ordering::Relaxed)) {
            libc::AF_INET => {
                let ip: [u8; 4] = [bytes[0], bytes[1], bytes[2], bytes[3]];
                Some(SocketAddr::new(IpAddr::from(ip), port))
            }
            libc::AF_INET6 => Some(SocketAddr::new(IpAddr::from(bytes), port)),
            _ => None,
        }
    }
}

/// A report, mapped shared for the life of the process.
#[derive(Clone, Copy)]
pub struct ReportFile {
    report: &'static Report,
}

impl ReportFile {
    /// Makes a report in memory. Also returns the descriptor, with close-on-exec, by which others
    /// [`find`](Self::find) it.
    ///
    /// # Errors
    /// Those of making and mapping the file.
    #[expect(clippy::cast_possible_truncation, reason = "small constants")]
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let (report, fd) = Shared::<Report>::create(c"manylane-report")?;
        let header = &report.header;
        header.version.store(VERSION, Ordering::Relaxed);
        header.receivers.store(RECEIVERS as u32, Ordering::Relaxed);
        header.reasons.store(REASONS as u32, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok((Self { report: report.leak() }, fd))
    }

    /// The path by which other processes can open `fd`, as long as this process has it open under
    /// its number.
    #[must_use]
    pub fn path(fd: BorrowedFd<'_>) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()).into()
    }

    /// Finds the report with this [`path`](Self::path). Uses the descriptor of that number if this
    /// process has inherited it, which needs neither `/proc` nor permission; otherwise opens the
    /// path. The second value is that descriptor. Must be called while no other thread opens or
    /// closes files.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn find(path: &Path) -> io::Result<(Self, Option<RawFd>)> {
        let number = path.file_name().and_then(|name| name.to_str()?.parse().ok());
        let inherited = number.and_then(|number| Some((number, fd::dup_inherited(number).ok()?)));
        let report = inherited.and_then(|(number, fd)| Some((Self::map(fd.as_fd()).ok()?, number)));
        match report {
            Some((report, number)) => Ok((report, Some(number))),
            // It has another number here, or another file has this number.
            None => Self::open(path).map(|report| (report, None)),
        }
    }

    /// Maps the report at `path`.
    ///
    /// # Errors
    /// Those of opening and mapping the file; `InvalidData` if it is not a report of this version,
    /// or could shrink.
    pub fn open(path: &Path) -> io::Result<Self> {
        // Never blocks, whatever file the path refers to now.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        Self::map(file.as_fd())
    }

    fn map(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let report = Shared::<Report>::open(fd)?;
        let header = &report.header;
        if header.magic.load(Ordering::Acquire) != MAGIC || header.version.load(Ordering::Relaxed) != VERSION
        {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a report of this version"));
        }
        Ok(Self { report: report.leak() })
    }

    /// The report, which changes as other processes write it.
    #[must_use]
    pub fn report(&self) -> &'static Report {
        self.report
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use manylane_sys::shared::sealed_memfd;
    use rustix::fs::MemfdFlags;

    use super::*;

    #[test]
    fn a_report_is_read_back_through_another_mapping() {
        let (ours, fd) = ReportFile::create().unwrap();
        let theirs = ReportFile::open(&ReportFile::path(fd.as_fd())).unwrap();
        let addr: SocketAddr = "[2001:db8::1]:53".parse().unwrap();
        ours.report().receivers[7].addr.set(&addr);
        assert_eq!(theirs.report().receivers[7].addr.read(), Some(addr));
        assert_eq!(theirs.report().receivers[8].addr.read(), None);
    }

    #[test]
    fn a_report_is_found_by_its_descriptor_or_by_its_path() {
        let (ours, fd) = ReportFile::create().unwrap();
        ours.report().header.last_pid.store(77, Ordering::Relaxed);
        let is_ours = |found: ReportFile| found.report().header.last_pid.load(Ordering::Relaxed) == 77;
        let number = fd.as_raw_fd();
        // The process that made it is not accessible.
        let (found, inherited) = ReportFile::find(&PathBuf::from(format!("/nowhere/fd/{number}"))).unwrap();
        assert_eq!((is_ours(found), inherited), (true, Some(number)));
        // The number is closed, or another file; the path has the number in the process that made
        // it.
        let path = ReportFile::path(fd.as_fd());
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("report");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let (found, inherited) = ReportFile::find(&link).unwrap();
        assert_eq!((is_ours(found), inherited), (true, None));
        assert!(ReportFile::find(Path::new("/nowhere/fd/-1")).is_err());
    }

    #[test]
    fn a_report_cannot_be_truncated() {
        let (_ours, fd) = ReportFile::create().unwrap();
        let path = ReportFile::path(fd.as_fd());
        assert!(OpenOptions::new().write(true).truncate(true).open(&path).is_err());
        let file = File::from(fd);
        assert!(file.set_len(0).is_err() && file.set_len(1 << 24).is_err());
    }

    #[test]
    fn unsealed_files_are_no_report() {
        let (_ours, fd) = ReportFile::create().unwrap();
        let mut bytes = vec![0; size_of::<Report>()];
        File::from(fd).read_exact_at(&mut bytes, 0).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, &bytes).unwrap();
        assert!(ReportFile::open(file.path()).is_err());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let loose = File::from(rustix::fs::memfd_create(c"open", flags).unwrap());
        loose.write_all_at(&bytes, 0).unwrap();
        assert_eq!(open_error(loose.as_fd()), Some(io::ErrorKind::InvalidData));
    }

    /// The error of opening the file of `fd` as a report.
    fn open_error(fd: BorrowedFd<'_>) -> Option<io::ErrorKind> {
        ReportFile::open(&ReportFile::path(fd)).err().map(|err| err.kind())
    }

    #[test]
    fn sealed_files_of_another_length_or_version_are_no_report() {
        for size in [size_of::<Report>() - 8, size_of::<Report>() + 8] {
            let fd = sealed_memfd(c"another", size).unwrap();
            // Valid apart from the length.
            let header = [MAGIC, VERSION].map(u32::to_ne_bytes);
            File::from(fd.try_clone().unwrap()).write_all_at(header.as_flattened(), 0).unwrap();
            assert_eq!(open_error(fd.as_fd()), Some(io::ErrorKind::InvalidData), "{size} bytes");
        }
        for (magic, version, error) in [
            (MAGIC, VERSION, None),
            (0, VERSION, Some(io::ErrorKind::InvalidData)),
            (MAGIC, VERSION + 1, Some(io::ErrorKind::InvalidData)),
        ] {
            let (report, fd) = ReportFile::create().unwrap();
            report.report().header.magic.store(magic, Ordering::Relaxed);
            report.report().header.version.store(version, Ordering::Relaxed);
            assert_eq!(open_error(fd.as_fd()), error, "{magic:#x}, {version}");
        }
    }
}
