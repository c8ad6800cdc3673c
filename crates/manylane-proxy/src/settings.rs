//! What a user can set, and what the lanes of a proxy have in common.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::balance::Balance;
use crate::header::ProxyHeader;
use crate::limits::Limits;
use crate::servers::Servers;

/// What a user can set.
#[derive(Clone, Debug)]
pub struct Options {
    /// How servers are chosen.
    pub balance: Balance,
    /// The header that servers expect.
    pub header: Option<ProxyHeader>,
    /// Longest time to connect to a server.
    pub connect_timeout: Duration,
    /// Longest time without bytes.
    pub idle_timeout: Duration,
    /// The same, once one side has ended its data.
    pub half_closed_timeout: Duration,
    /// Connections of clients at most.
    pub connections_max: u64,
    /// Connections of one source address at most; none: not limited.
    pub connections_max_per_source: Option<u32>,
    /// Longest time that connections have to end, once no more are accepted.
    pub drain_timeout: Duration,
    /// UDP: answers to each datagram of a client, after which a session ends; none: not known.
    pub answers: Option<NonZeroU32>,
    /// UDP: servers that refuse datagrams are taken out, until [`Servers::readmit`] is called.
    pub takes_out_refusing: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            balance: Balance::default(),
            header: None,
            connect_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(300),
            half_closed_timeout: Duration::from_secs(30),
            connections_max: 100_000,
            connections_max_per_source: None,
            drain_timeout: Duration::from_secs(30),
            answers: None,
            takes_out_refusing: true,
        }
    }
}

/// What is in force for connections that begin.
#[derive(Debug)]
pub struct Settings {
    /// The options.
    pub options: Options,
    /// The servers.
    pub servers: Servers,
}

/// What the lanes of a proxy have in common.
#[derive(Debug)]
pub struct Shared {
    settings: Mutex<Arc<Settings>>,
    /// Counts changes of the settings, so that lanes need not lock to see one.
    generation: AtomicU64,
    limits: Limits,
    is_stopping: AtomicBool,
}

impl Shared {
    /// A proxy to these servers.
    #[must_use]
    pub fn new(options: Options, servers: &[SocketAddr]) -> Arc<Shared> {
        let limits = Limits::new(options.connections_max, options.connections_max_per_source);
        let servers = Servers::new(servers, &Servers::default());
        Arc::new(Shared {
            settings: Mutex::new(Arc::new(Settings { options, servers })),
            generation: AtomicU64::new(0),
            limits,
            is_stopping: AtomicBool::new(false),
        })
    }

    /// What is in force.
    #[must_use]
    pub fn settings(&self) -> Arc<Settings> {
        // What is stored is always whole, so a poisoned lock can be used.
        Arc::clone(&self.settings.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes options and servers, for connections that come. Those that there are live on, also
    /// with servers that are no longer among them; they get the new time-outs when an old one has
    /// passed.
    pub fn reload(&self, options: Options, servers: &[SocketAddr]) {
        self.limits.set(options.connections_max, options.connections_max_per_source);
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let servers = Servers::new(servers, &settings.servers);
        *settings = Arc::new(Settings { options, servers });
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Changes with the settings.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// No more connections are accepted. Lanes end when the last session has, or after the drain
    /// timeout.
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
    }
}
