//! Sends, receives and peeks at messages with descriptors.

use std::io::{self, ErrorKind, IoSlice};
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::net::{self, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown};

use crate::sock;

/// Descriptors that one message can carry.
pub const FDS_MAX: usize = 4;

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
