//! Where a server runs.

use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, thread};

use manylane_sys::netns::NetNs;
use manylane_testbed::{Host, testbed};

/// A network namespace with nothing but loopback, if that can be had, and a folder.
pub(crate) struct Place {
    namespace: Option<NetNs>,
    folder: PathBuf,
}

impl Place {
    /// A place for the test of that name.
    pub(crate) fn new(test: &str) -> Self {
        Self::within(test, testbed::available().is_ok().then(|| NetNs::create().unwrap()))
    }

    /// A place on a host of a testbed.
    pub(crate) fn at(test: &str, host: &Host) -> Self {
        Self::within(test, Some(NetNs::open(&host.namespace().path()).unwrap()))
    }

    fn within(test: &str, namespace: Option<NetNs>) -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("servers").join(test);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let place = Self { namespace, folder };
        if place.namespace.is_some() {
            let mut ip = place.command("ip");
            ip.args(["link", "set", "lo", "up"]);
            crate::run_ok(ip);
        }
        place
    }

    /// An empty folder that servers under other users can read and write, too.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes a file there and returns its path.
    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.folder.join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Writes a file there, with what stands for each of the words between two @ in `text`, and
    /// returns its path.
    pub(crate) fn filled(&self, name: &str, text: &str, words: &[(&str, &str)]) -> String {
        let at = ("FOLDER", self.folder.to_str().unwrap());
        let fill = |text: String, (word, with): &(&str, &str)| text.replace(&format!("@{word}@"), with);
        let text = words.iter().chain([&at]).fold(text.to_owned(), fill);
        self.file(name, &text)
    }

    /// A path there.
    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.join(name).to_str().unwrap().to_owned()
    }

    /// A command that runs there.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        if let Some(namespace) = &self.namespace {
            namespace.enter_in_child(&mut command).unwrap();
        }
        command
    }

    /// A socket there, on loopback, on a port that was free.
    pub(crate) fn socket(&self) -> UdpSocket {
        self.socket_at("127.0.0.1:0")
    }

    /// A socket there.
    pub(crate) fn socket_at(&self, at: &str) -> UdpSocket {
        let bind = || UdpSocket::bind(at).unwrap();
        let Some(namespace) = &self.namespace else {
            return bind();
        };
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                namespace.enter().unwrap();
                bind()
            });
            inside.join().unwrap()
        })
    }

    /// An address that is free, for UDP and probably for TCP.
    pub(crate) fn free_addr(&self) -> SocketAddr {
        self.socket().local_addr().unwrap()
    }
}
