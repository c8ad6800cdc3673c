//! Local sockets that carry messages and descriptors (`AF_UNIX`, `SOCK_SEQPACKET`, Linux 2.6.4),
//! under abstract names, which belong to the network namespace and not to a file system.

use std::io::{self, ErrorKind, IoSlice};
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    self, AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown,
    SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process;

use crate::{check, sock};

/// Descriptors that one message can carry.
pub const FDS_MAX: usize = 4;

/// Backlog of connections to accept.
const BACKLOG: libc::c_int = 16;

/// Credentials of the peer of a connection, from the kernel, as of its connect or listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCred {
    /// Process id as this process sees it; 0 if it is not visible.
    pub pid: u32,
    /// Effective user as this process sees it.
    pub uid: u32,
}

impl PeerCred {
    /// True if the peer certainly belongs to the user `uid`. All users that a user namespace does
    /// not map share one number (`kernel.overflowuid`), so that number identifies no user.
    #[must_use]
    pub fn is_user(&self, uid: u32) -> bool {
        self.uid == uid && overflow_uid() != Some(uid)
    }
}

/// The number of all users that this process's user namespace does not map; none if it maps all.
fn overflow_uid() -> Option<u32> {
    (!maps_all(&read_text("/proc/thread-self/uid_map"))).then(overflow_number)
}

/// A number that never identifies a user to this process: the number of users that are not mapped
/// in its user namespace, or in one that it may enter. None if it is certainly this process's own.
#[must_use]
pub fn ambiguous_uid() -> Option<u32> {
    let number = overflow_number();
    let is_own = effective_uid() == number && overflow_uid().is_none();
    (!is_own).then_some(number)
}

fn overflow_number() -> u32 {
    /// The kernel's default, if `/proc` is not readable.
    const DEFAULT: u32 = 65534;
    read_text("/proc/sys/kernel/overflowuid").trim().parse().unwrap_or(DEFAULT)
}

fn read_text(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// True if a uid map (first number inside, first number outside, count) has all users except -1,
/// which is no user.
fn maps_all(map: &str) -> bool {
    let counts = map.lines().filter_map(|line| line.split_ascii_whitespace().nth(2)?.parse::<u64>().ok());
    counts.fold(0, u64::saturating_add) >= u64::from(u32::MAX)
}

/// An unconnected socket.
///
/// # Errors
/// `EMFILE` without descriptors.
pub fn socket() -> io::Result<OwnedFd> {
    open(SocketFlags::empty())
}

fn open(flags: SocketFlags) -> io::Result<OwnedFd> {
    // Bypasses the C library, here and below: the preload library overrides its functions, and
    // requests queues within calls of the program.
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | flags, None)?)
}

/// Listens under an abstract `name`, in the network namespace of the calling thread; [`accept`]
/// does not block.
///
/// # Errors
/// `EADDRINUSE` if the name is taken, `ENAMETOOLONG`, `EMFILE` without descriptors.
pub fn listen(name: &str) -> io::Result<OwnedFd> {
    let socket = open(SocketFlags::NONBLOCK)?;
    net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// As [`listen`], for connections that cannot carry descriptors: sending some fails
/// (`SO_PASSRIGHTS`, Linux 6.16). Before that they arrive, and receiving them, or closing a
/// connection with unread ones, may block for as long as the sender likes, if closing the
/// descriptor blocks.
///
/// # Errors
/// As for [`listen`].
pub fn listen_without_fds(name: &str) -> io::Result<OwnedFd> {
    let socket = listen(name)?;
    _ = accept_fds(socket.as_fd(), false);
    Ok(socket)
}

/// Lets descriptors arrive by a connection, or not (`SO_PASSRIGHTS`, Linux 6.16).
///
/// # Errors
/// `ENOPROTOOPT` before Linux 6.16: they always arrive.
pub fn accept_fds(fd: BorrowedFd<'_>, do_accept: bool) -> io::Result<()> {
    /// Defined in asm-generic/socket.h.
    const SO_PASSRIGHTS: libc::c_int = 83;
    sock::set(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, i32::from(do_accept))
}

/// Accepts a connection, whose operations do not block either.
///
/// # Errors
/// `WouldBlock` if there is none, `EMFILE` without descriptors.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(net::accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?)
}

/// Connects to an abstract `name` in the network namespace of the calling thread. Connecting, and
/// every operation on the connection, waits for at most `patience`.
///
/// # Errors
/// `ECONNREFUSED` if there is no listener, `WouldBlock` after a timeout.
pub fn connect(name: &str, patience: Duration) -> io::Result<OwnedFd> {
    let socket = socket()?;
    connect_socket(socket.as_fd(), name, patience)?;
    Ok(socket)
}

/// As [`connect`], for a connection by which no descriptors arrive, as with
/// [`listen_without_fds`], and messages can be peeked at ([`enable_peek`]).
///
/// # Errors
/// As for [`connect`].
pub fn connect_without_fds(name: &str, patience: Duration) -> io::Result<OwnedFd> {
    connect_socket_without_fds(socket()?, name, patience)
}

/// As [`connect_without_fds`], but does not wait for a listener whose backlog is full.
///
/// # Errors
/// As for [`connect`]; `WouldBlock` if the backlog is full.
pub fn connect_now_without_fds(name: &str, patience: Duration) -> io::Result<OwnedFd> {
    let socket = connect_socket_without_fds(open(SocketFlags::NONBLOCK)?, name, patience)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket)
}

fn connect_socket_without_fds(socket: OwnedFd, name: &str, patience: Duration) -> io::Result<OwnedFd> {
    _ = accept_fds(socket.as_fd(), false);
    enable_peek(socket.as_fd())?;
    connect_socket(socket.as_fd(), name, patience)?;
    Ok(socket)
}

/// As [`connect`], with a socket of the caller.
///
/// # Errors
/// As for [`connect`].
pub fn connect_socket(socket: BorrowedFd<'_>, name: &str, patience: Duration) -> io::Result<()> {
    set_timeout(socket, patience)?;
    Ok(net::connect(socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?)
}

/// Limits the time that each operation on a connection waits.
///
/// # Errors
/// Those of `setsockopt(2)`.
fn set_timeout(fd: BorrowedFd<'_>, patience: Duration) -> io::Result<()> {
    // The kernel takes a signed number of seconds.
    let limit = Some(patience.min(Duration::from_secs(1 << 30)));
    sockopt::set_socket_timeout(fd, Timeout::Recv, limit)?;
    Ok(sockopt::set_socket_timeout(fd, Timeout::Send, limit)?)
}

/// The credentials of the peer (`SO_PEERCRED`).
///
/// # Errors
/// Those of `getsockopt(2)`.
pub fn peer_cred(fd: BorrowedFd<'_>) -> io::Result<PeerCred> {
    let [pid, uid, _gid]: [u32; 3] = sock::get(fd, libc::SOL_SOCKET, libc::SO_PEERCRED)?;
    Ok(PeerCred { pid, uid })
}

/// A connected process, which cannot be confused with any other.
#[derive(Debug)]
pub struct PeerProcess {
    /// Its credentials when it connected.
    pub cred: PeerCred,
    pidfd: OwnedFd,
}

impl PeerProcess {
    /// The peer of an accepted connection.
    ///
    /// # Errors
    /// `ESRCH` if it has ended, or is not visible.
    pub fn from_socket(fd: BorrowedFd<'_>) -> io::Result<Self> {
        /// Defined in asm-generic/socket.h, since Linux 6.5.
        const SO_PEERPIDFD: libc::c_int = 77;
        let peer = peer_cred(fd)?;
        let asked = sock::get(fd, libc::SOL_SOCKET, SO_PEERPIDFD);
        let raw: libc::c_int = match asked {
            Err(err) if err.raw_os_error() == Some(libc::ENOPROTOOPT) => {
                // By pid, which another process could have by now. A peer that delays until its
                // pid is reused can only be mistaken for a process that connects, too.
                // SAFETY: pidfd_open(2), since Linux 5.3, takes two numbers.
                check(unsafe { libc::syscall(libc::SYS_pidfd_open, peer.pid, 0) } as libc::c_int)?
            }
            asked => asked?,
        };
        // SAFETY: the descriptor is new, and this value is its only owner.
        Ok(Self { cred: peer, pidfd: unsafe { OwnedFd::from_raw_fd(raw) } })
    }

    /// True if it has not ended.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&now)) == Ok(0)
    }

    /// True if both are the same living process, and its user is unchanged.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        // A pid is reused only after its process has ended.
        self.cred == other.cred && self.is_alive() && other.is_alive()
    }
}

/// The effective user of this process.
#[must_use]
pub fn effective_uid() -> u32 {
    process::geteuid().as_raw()
}

/// Aligned buffer for control messages, with room for the descriptors of one message, and for its
/// credentials.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Size of a control message with credentials.
const CREDENTIALS_SPACE: usize = 16 + size_of::<libc::ucred>().next_multiple_of(8);

// Room for the descriptors and the header of their control message.
const _: () = assert!(CREDENTIALS_SPACE + 16 + FDS_MAX * size_of::<libc::c_int>() <= size_of::<Control>());

/// Sends one message with `fds` (at most [`FDS_MAX`]), whole or not at all.
///
/// # Errors
/// `EPIPE` if the other end is closed; `WouldBlock` if there is no room.
pub fn send(fd: BorrowedFd<'_>, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if fds.len() > FDS_MAX {
        return Err(io::Error::from(ErrorKind::InvalidInput));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        // There is room: the number was checked.
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    net::sendmsg(fd, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one message into `buffer`, and its descriptors. Zero bytes mean that the other end is
/// closed.
///
/// # Errors
/// `WouldBlock` if there is no message; `InvalidData` for a message that is longer than the buffer
/// or has too many descriptors.
pub fn recv(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut fds = [const { None }; FDS_MAX];
    let len = recv_into(fd, buffer, &mut fds)?;
    Ok((len, fds.into_iter().flatten().collect()))
}

/// As [`recv`], but puts the descriptors into `fds` and does not use the heap.
///
/// # Errors
/// As for [`recv`].
pub fn recv_into(
    fd: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut [Option<OwnedFd>; FDS_MAX],
) -> io::Result<usize> {
    let mut control = Control([0; 64]);
    let (len, header) = recvmsg(fd, buffer, &mut control.0, libc::MSG_CMSG_CLOEXEC)?;
    let mut places = fds.iter_mut();
    let mut too_many = false;
    // SAFETY: the header is the one that the kernel filled in, and the buffer that it points to,
    // `control`, is alive. The kernel wrote whole messages, whose lengths tell how many descriptors
    // follow. Each of those is new and has no other owner, so it is closed once, here or later.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(&raw const header);
        while !message.is_null() {
            if ((*message).cmsg_level, (*message).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = ((*message).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = libc::CMSG_DATA(message).cast::<libc::c_int>();
                for at in 0..bytes / size_of::<libc::c_int>() {
                    let new = OwnedFd::from_raw_fd(data.add(at).read_unaligned());
                    match places.next() {
                        Some(place) => *place = Some(new),
                        None => too_many = true,
                    }
                }
            }
            message = libc::CMSG_NXTHDR(&raw const header, message);
        }
    }
    if too_many || header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
        // No text: the preload library calls this before a fork, where it must not use the heap.
        return Err(ErrorKind::InvalidData.into());
    }
    Ok(len)
}

/// Receives one message with its control messages. Returns its length, and the header that the
/// kernel filled in. That points to `control`, the beginning of a [`Control`].
fn recvmsg(
    fd: BorrowedFd<'_>,
    buffer: &mut [u8],
    control: &mut [u8],
    flags: libc::c_int,
) -> io::Result<(usize, libc::msghdr)> {
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: integers and pointers that may be null: all zeros are valid.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = control.len() as _;
    // SAFETY: the kernel writes at most as many bytes as the buffers have, which live across the
    // call.
    let len = unsafe { libc::syscall(libc::SYS_recvmsg, fd.as_raw_fd(), &raw mut header, flags) };
    header.msg_iov = std::ptr::null_mut();
    if len < 0 { Err(io::Error::last_os_error()) } else { Ok((len as usize, header)) }
}

/// A message that is still queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peeked {
    /// Its length; the buffer may hold less.
    pub len: usize,
    /// It carries descriptors.
    pub has_fds: bool,
}

/// Lets [`peek`] and [`drain`] distinguish an empty message from the end of a connection
/// (`SO_PASSCRED`).
///
/// # Errors
/// Those of `setsockopt(2)`.
pub fn enable_peek(fd: BorrowedFd<'_>) -> io::Result<()> {
    sock::set(fd, libc::SOL_SOCKET, libc::SO_PASSCRED, 1_i32)
}

/// Copies the next message into `buffer` and leaves it queued; none at the end of the connection.
/// Receives and closes no descriptor, so it does not block.
///
/// # Errors
/// `WouldBlock` if no message is queued.
pub fn peek(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Option<Peeked>> {
    // Each message has its sender's credentials, for which there is room. There is none for
    // descriptors: the kernel installs none, and reports truncation.
    let mut control = Control([0; 64]);
    let flags = libc::MSG_PEEK | libc::MSG_TRUNC | libc::MSG_DONTWAIT;
    let (len, header) = recvmsg(fd, buffer, &mut control.0[..CREDENTIALS_SPACE], flags)?;
    let has_fds = header.msg_flags & libc::MSG_CTRUNC != 0;
    Ok((header.msg_controllen > 0 || has_fds).then_some(Peeked { len, has_fds }))
}

/// Blocks until a message is queued, or the other end is closed.
///
/// # Errors
/// `WouldBlock` if the timeout of the connection expires.
pub fn wait_for_message(fd: BorrowedFd<'_>) -> io::Result<()> {
    net::recv(fd, &mut [0; 0], RecvFlags::PEEK)?;
    Ok(())
}

/// Removes the next message from the queue. Its descriptors are closed, which can block.
///
/// # Errors
/// `WouldBlock` if no message is queued.
pub fn discard(fd: BorrowedFd<'_>) -> io::Result<()> {
    net::recv(fd, &mut [0; 0], RecvFlags::DONTWAIT)?;
    Ok(())
}

/// As [`recv`], for a message without descriptors: one with descriptors stays queued, so that
/// none are received or closed. Does not block. Needs [`enable_peek`].
///
/// # Errors
/// As for [`recv`]; `InvalidData` if the message carries descriptors.
pub fn recv_without_fds(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    match peek(fd, buffer)? {
        None => Ok(0),
        Some(Peeked { len, has_fds: false }) if len <= buffer.len() => discard(fd).map(|()| len),
        Some(_) => Err(ErrorKind::InvalidData.into()),
    }
}

/// Refuses further messages, and discards those queued up to the first that carries descriptors.
/// True if none does: closing the connection does not block then. Needs [`enable_peek`].
#[must_use]
pub fn drain(fd: BorrowedFd<'_>) -> bool {
    // Cannot fail for a connection, even one that has ended.
    _ = net::shutdown(fd, Shutdown::Read);
    loop {
        match peek(fd, &mut []) {
            Ok(None) => return true,
            Ok(Some(Peeked { has_fds: false, .. })) if discard(fd).is_ok() => {}
            // The other end was closed with unread messages: reported once.
            Err(err) if err.kind() == ErrorKind::ConnectionReset => {}
            _ => return false,
        }
    }
}

/// As [`drain`], but discards messages with descriptors, too. Those are closed, which can block.
pub fn drain_blocking(fd: BorrowedFd<'_>) {
    while !drain(fd) && discard(fd).is_ok() {}
}

/// Refuses further connections to a listener. Those that are pending can still be accepted.
pub fn refuse_connections(listener: BorrowedFd<'_>) {
    // Cannot fail for a socket that listens.
    _ = net::shutdown(listener, Shutdown::Read);
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::time::Instant;

    use super::*;

    fn name() -> String {
        format!("manylane.test.{}.{:?}", std::process::id(), std::thread::current().id())
    }

    #[test]
    fn messages_keep_their_bounds_and_carry_descriptors() {
        let name = name();
        let listener = listen(&name).unwrap();
        assert_eq!(accept(listener.as_fd()).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(listen(&name).unwrap_err().kind(), ErrorKind::AddrInUse);
        let client = connect(&name, Duration::from_secs(5)).unwrap();
        let server = accept(listener.as_fd()).unwrap();
        let mine = PeerCred { pid: std::process::id(), uid: effective_uid() };
        assert_eq!((peer_cred(server.as_fd()).unwrap(), peer_cred(client.as_fd()).unwrap()), (mine, mine));
        let process = PeerProcess::from_socket(server.as_fd()).unwrap();
        assert!(process.cred == mine && process.is_alive() && process.is_same(&process));
        send(client.as_fd(), b"one", &[]).unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        send(client.as_fd(), b"two", &[writer.as_fd(), writer.as_fd()]).unwrap();
        drop(writer);
        let mut buffer = [0; 8];
        let (len, fds) = recv(server.as_fd(), &mut buffer).unwrap();
        assert_eq!((&buffer[..len], fds.len()), (&b"one"[..], 0));
        let (len, mut fds) = recv(server.as_fd(), &mut buffer).unwrap();
        assert_eq!((&buffer[..len], fds.len()), (&b"two"[..], 2));
        assert_eq!(recv(server.as_fd(), &mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
        io::Write::write_all(&mut File::from(fds.remove(0)), b"through").unwrap();
        drop(fds);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
        send(client.as_fd(), b"longer than that", &[]).unwrap();
        assert_eq!(recv(server.as_fd(), &mut buffer).unwrap_err().kind(), ErrorKind::InvalidData);
        drop(client);
        assert_eq!(recv(server.as_fd(), &mut buffer).unwrap().0, 0);
        assert_eq!(send(server.as_fd(), b"gone", &[]).unwrap_err().kind(), ErrorKind::BrokenPipe);
    }

    #[test]
    fn no_descriptors_come_where_none_are_wanted() {
        let name = name();
        let listener = listen_without_fds(&name).unwrap();
        let client = connect(&name, Duration::from_secs(5)).unwrap();
        let server = accept(listener.as_fd()).unwrap();
        let sent = send(client.as_fd(), b"some", &[client.as_fd()]);
        match recv(server.as_fd(), &mut [0; 8]) {
            Err(err) => {
                assert_eq!(err.kind(), ErrorKind::WouldBlock);
                assert_eq!(sent.unwrap_err().raw_os_error(), Some(libc::EPERM));
            }
            Ok((_, fds)) => {
                println!("skipped: this kernel has no SO_PASSRIGHTS (Linux 6.16)");
                assert_eq!((sent.is_ok(), fds.len()), (true, 1));
            }
        }
        send(client.as_fd(), b"more", &[]).unwrap();
        assert_eq!(recv(server.as_fd(), &mut [0; 8]).unwrap().0, 4);
        // In the other direction they arrive as usual.
        send(server.as_fd(), b"back", &[server.as_fd()]).unwrap();
        assert_eq!(recv(client.as_fd(), &mut [0; 8]).unwrap().1.len(), 1);
    }

    #[test]
    fn a_client_receives_no_descriptors_that_it_does_not_want() {
        let name = name();
        let listener = listen(&name).unwrap();
        let client = connect_without_fds(&name, Duration::from_secs(5)).unwrap();
        let server = accept(listener.as_fd()).unwrap();
        let mut buffer = [0; 8];
        let start = Instant::now();
        let nothing = recv_without_fds(client.as_fd(), &mut buffer).unwrap_err();
        assert_eq!(nothing.kind(), ErrorKind::WouldBlock);
        assert!(start.elapsed() < Duration::from_secs(5), "it does not wait");
        send(server.as_fd(), b"some", &[]).unwrap();
        assert_eq!(recv_without_fds(client.as_fd(), &mut buffer).unwrap(), 4);
        assert_eq!(&buffer[..4], b"some");
        let sent = send(server.as_fd(), b"more", &[server.as_fd()]);
        match accept_fds(client.as_fd(), true) {
            Ok(()) => {
                assert_eq!(sent.unwrap_err().raw_os_error(), Some(libc::EPERM));
                send(server.as_fd(), b"more", &[server.as_fd()]).unwrap();
            }
            Err(_) => sent.unwrap(),
        }
        let refused = recv_without_fds(client.as_fd(), &mut buffer).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidData);
        let (len, fds) = recv(client.as_fd(), &mut buffer).unwrap();
        assert_eq!((len, fds.len()), (4, 1), "it stays queued");
        drop(fds);
        send(server.as_fd(), b"longer than that", &[]).unwrap();
        let refused = recv_without_fds(client.as_fd(), &mut buffer).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidData);
        discard(client.as_fd()).unwrap();
        drop(server);
        assert_eq!(recv_without_fds(client.as_fd(), &mut buffer).unwrap(), 0);
    }

    #[test]
    fn what_is_peeked_at_stays_with_its_descriptors() {
        let name = name();
        let listener = listen(&name).unwrap();
        let client = connect(&name, Duration::from_secs(5)).unwrap();
        let server = accept(listener.as_fd()).unwrap();
        enable_peek(server.as_fd()).unwrap();
        let mut buffer = [0; 2];
        assert_eq!(wait_for_message(server.as_fd()).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(peek(server.as_fd(), &mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
        let (mut reader, writer) = io::pipe().unwrap();
        for fds in [&[][..], &[writer.as_fd(), writer.as_fd()]] {
            for message in [&b""[..], b"some"] {
                send(client.as_fd(), message, fds).unwrap();
            }
        }
        drop(writer);
        wait_for_message(server.as_fd()).unwrap();
        let plain = Peeked { len: 0, has_fds: false };
        assert_eq!(peek(server.as_fd(), &mut buffer).unwrap(), Some(plain));
        discard(server.as_fd()).unwrap();
        assert_eq!(peek(server.as_fd(), &mut buffer).unwrap(), Some(Peeked { len: 4, ..plain }));
        assert_eq!(&buffer, b"so");
        assert!(!drain(server.as_fd()), "messages with descriptors are left");
        assert_eq!(send(client.as_fd(), b"more", &[]).unwrap_err().kind(), ErrorKind::BrokenPipe);
        for len in [0, 4] {
            assert_eq!(peek(server.as_fd(), &mut []).unwrap(), Some(Peeked { len, has_fds: true }));
            let (len_received, fds) = recv(server.as_fd(), &mut [0; 8]).unwrap();
            assert_eq!((len_received, fds.len()), (len, 2));
        }
        assert_eq!(reader.read(&mut buffer).unwrap(), 0, "all descriptors were received");
        assert!(drain(server.as_fd()));
        drop(client);
        assert_eq!(peek(server.as_fd(), &mut []).unwrap(), None);
    }

    #[test]
    fn who_may_be_anybody_in_a_user_namespace_is_known() {
        for (map, all) in [
            ("         0          0 4294967295\n", true),
            ("0 0 1000\n1000 100000 4294966295\n", true),
            ("         0       1000          1\n", false),
            ("0 100000 65536\n", false),
            ("", false),
        ] {
            assert_eq!(maps_all(map), all, "{map}");
        }
        let own = effective_uid();
        let is_certain = overflow_uid() != Some(own);
        assert_eq!(PeerCred { pid: 1, uid: own }.is_user(own), is_certain);
        assert!(!PeerCred { pid: 1, uid: own.wrapping_add(1) }.is_user(own));
    }

    #[test]
    fn waiting_has_a_bound() {
        let name = name();
        let _listener = listen(&name).unwrap();
        let client = connect(&name, Duration::from_millis(1)).unwrap();
        assert_eq!(recv(client.as_fd(), &mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(connect(&format!("{name}.nobody"), Duration::from_secs(5)).is_err());
        assert_eq!(listen(&"x".repeat(108)).unwrap_err().raw_os_error(), Some(libc::ENAMETOOLONG));
    }
}
