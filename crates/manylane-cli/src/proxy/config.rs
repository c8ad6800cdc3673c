//! The configuration of a proxy: of its options, or of a file.

use std::fmt::Display;
use std::fs;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use manylane::tcp::congestion::Algorithm;
use manylane::{Engine, Limit, Prefix};
use manylane_proxy::Options;
use manylane_proxy::udp::PayloadKey;
use serde::{Deserialize, Deserializer};

use crate::args::{ProxyArgs, ProxyStack, port_range};
use crate::parse;
use manylane_ipc::RX_USECS_MAX;

/// Default of the idle timeout.
const TCP_IDLE_TIMEOUT: Duration = Duration::from_secs(300);
const UDP_IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// A configuration that was checked.
#[derive(Clone, Debug)]
pub(super) struct Config {
    pub(super) udp: bool,
    pub(super) key: Option<PayloadKey>,
    pub(super) engine: Engine,
    pub(super) listen: Vec<SocketAddr>,
    pub(super) to: Vec<SocketAddr>,
    pub(super) options: Options,
    pub(super) memory_max: Option<usize>,
    pub(super) client_congestion: Option<Algorithm>,
    pub(super) server_congestion: Option<Algorithm>,
    pub(super) check_interval: Duration,
    pub(super) stack: ProxyStack,
    pub(super) lanes: Option<usize>,
    pub(super) interface: Vec<String>,
    pub(super) source_ports: RangeInclusive<u16>,
    pub(super) xdp_generic: bool,
    pub(super) rx_usecs: Option<u64>,
    pub(super) limit: Vec<Limit>,
    pub(super) allow: Vec<Prefix>,
    pub(super) deny: Vec<Prefix>,
}

/// The file: the options by their names. What is missing has the default of the option.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    udp: bool,
    #[serde(default, deserialize_with = "text")]
    key: Option<PayloadKey>,
    answers: Option<NonZeroU32>,
    #[serde(default, deserialize_with = "text")]
    engine: Option<Engine>,
    #[serde(deserialize_with = "texts")]
    listen: Vec<SocketAddr>,
    #[serde(deserialize_with = "texts")]
    to: Vec<SocketAddr>,
    #[serde(default, deserialize_with = "text")]
    balance: Option<manylane_proxy::Balance>,
    #[serde(default, deserialize_with = "text")]
    proxy_protocol: Option<manylane_proxy::ProxyHeader>,
    #[serde(default, deserialize_with = "time")]
    check_interval: Option<Duration>,
    #[serde(default, deserialize_with = "stack")]
    stack: Option<ProxyStack>,
    lanes: Option<usize>,
    #[serde(default)]
    interface: Vec<String>,
    #[serde(default, deserialize_with = "ports")]
    source_ports: Option<RangeInclusive<u16>>,
    #[serde(default)]
    xdp_generic: bool,
    rx_usecs: Option<u64>,
    #[serde(default, deserialize_with = "texts")]
    limit: Vec<Limit>,
    #[serde(default, deserialize_with = "texts")]
    allow: Vec<Prefix>,
    #[serde(default, deserialize_with = "texts")]
    deny: Vec<Prefix>,
    max_connections: Option<u64>,
    max_per_source: Option<u32>,
    #[serde(default, deserialize_with = "bytes")]
    max_memory: Option<usize>,
    #[serde(default, deserialize_with = "text")]
    client_congestion: Option<Algorithm>,
    #[serde(default, deserialize_with = "text")]
    server_congestion: Option<Algorithm>,
    #[serde(default, deserialize_with = "time")]
    connect_timeout: Option<Duration>,
    #[serde(default, deserialize_with = "time")]
    idle_timeout: Option<Duration>,
    #[serde(default, deserialize_with = "time")]
    half_closed_timeout: Option<Duration>,
    #[serde(default, deserialize_with = "time")]
    drain_timeout: Option<Duration>,
}

impl Config {
    /// The configuration that the command line says, or the file that it names.
    pub(super) fn new(args: &ProxyArgs) -> Result<Config> {
        let of_args = Config::of_args(args);
        match &args.config {
            Some(path) => of_args.with_file(&read(path)?),
            None => Ok(of_args),
        }
    }

    fn of_args(args: &ProxyArgs) -> Config {
        Config {
            udp: args.udp,
            key: args.key,
            engine: args.engine.unwrap_or_default(),
            listen: args.listen.clone(),
            to: args.to.clone(),
            options: Options {
                balance: args.balance,
                header: args.proxy_protocol,
                connect_timeout: args.connect_timeout,
                idle_timeout: args.idle_timeout.unwrap_or(default_idle_timeout(args.udp)),
                half_closed_timeout: args.half_closed_timeout,
                connections_max: args.max_connections,
                connections_max_per_source: args.max_per_source,
                drain_timeout: args.drain_timeout,
                answers: args.answers,
                takes_out_refusing: !args.check_interval.is_zero(),
            },
            memory_max: args.max_memory,
            client_congestion: args.client_congestion,
            server_congestion: args.server_congestion,
            check_interval: args.check_interval,
            stack: args.stack,
            lanes: args.lanes,
            interface: args.interface.clone(),
            source_ports: args.source_ports.clone(),
            xdp_generic: args.xdp_generic,
            rx_usecs: args.rx_usecs,
            limit: args.filter.limit.clone(),
            allow: args.filter.allow.clone(),
            deny: args.filter.deny.clone(),
        }
    }

    /// What the file says, and `self` where it says nothing: there are no other options beside a
    /// file, so these are the defaults.
    fn with_file(self, file: &File) -> Result<Config> {
        if file.listen.is_empty() || file.to.is_empty() {
            return Err(anyhow!("listen and to: expected an address or more"));
        }
        if file.lanes.is_some_and(|lanes| !(1..=256).contains(&lanes)) {
            return Err(anyhow!("lanes: expected 1 to 256"));
        }
        if file.rx_usecs.is_some_and(|usecs| usecs > RX_USECS_MAX) {
            return Err(anyhow!("rx-usecs: expected 0 to {RX_USECS_MAX}"));
        }
        if let Some(key) = file.misplaced() {
            let which = if file.udp { "does not apply with" } else { "needs" };
            return Err(anyhow!("{key}: {which} udp = true"));
        }
        let defaults = self.options;
        let check_interval = file.check_interval.unwrap_or(self.check_interval);
        Ok(Config {
            udp: file.udp,
            key: file.key,
            engine: file.engine.unwrap_or_default(),
            listen: file.listen.clone(),
            to: file.to.clone(),
            options: Options {
                balance: file.balance.unwrap_or(defaults.balance),
                header: file.proxy_protocol,
                connect_timeout: file.connect_timeout.unwrap_or(defaults.connect_timeout),
                idle_timeout: file.idle_timeout.unwrap_or(default_idle_timeout(file.udp)),
                half_closed_timeout: file.half_closed_timeout.unwrap_or(defaults.half_closed_timeout),
                connections_max: file.max_connections.unwrap_or(defaults.connections_max),
                connections_max_per_source: file.max_per_source,
                drain_timeout: file.drain_timeout.unwrap_or(defaults.drain_timeout),
                answers: file.answers,
                takes_out_refusing: !check_interval.is_zero(),
            },
            memory_max: file.max_memory,
            client_congestion: file.client_congestion,
            server_congestion: file.server_congestion,
            check_interval,
            stack: file.stack.unwrap_or(self.stack),
            lanes: file.lanes,
            interface: file.interface.clone(),
            source_ports: file.source_ports.clone().unwrap_or(self.source_ports),
            xdp_generic: file.xdp_generic,
            rx_usecs: file.rx_usecs,
            limit: file.limit.clone(),
            allow: file.allow.clone(),
            deny: file.deny.clone(),
        })
    }

    /// What differs of that which a reload cannot change.
    pub(super) fn fixed_difference(&self, new: &Config) -> Option<&'static str> {
        [
            (self.udp != new.udp, "udp"),
            (self.key != new.key, "key"),
            (self.engine != new.engine, "engine"),
            (self.listen != new.listen, "listen"),
            (self.memory_max != new.memory_max, "max-memory"),
            (self.client_congestion != new.client_congestion, "client-congestion"),
            (self.server_congestion != new.server_congestion, "server-congestion"),
            (self.check_interval != new.check_interval, "check-interval"),
            (self.stack != new.stack, "stack"),
            (self.lanes != new.lanes, "lanes"),
            (self.interface != new.interface, "interface"),
            (self.source_ports != new.source_ports, "source-ports"),
            (self.xdp_generic != new.xdp_generic, "xdp-generic"),
            (self.rx_usecs != new.rx_usecs, "rx-usecs"),
            (self.limit != new.limit, "limit"),
            (self.allow != new.allow, "allow"),
            (self.deny != new.deny, "deny"),
        ]
        .into_iter()
        .find_map(|(differs, name)| differs.then_some(name))
    }
}

impl File {
    /// A key that only has a meaning with UDP, or without it, and is in the wrong file.
    fn misplaced(&self) -> Option<&'static str> {
        let of_udp = [
            (self.key.is_some(), "key"),
            (self.answers.is_some(), "answers"),
            (self.engine.is_some(), "engine"),
        ];
        let of_tcp = [
            (self.proxy_protocol.is_some(), "proxy-protocol"),
            (self.stack.is_some(), "stack"),
            (self.source_ports.is_some(), "source-ports"),
            (self.rx_usecs.is_some(), "rx-usecs"),
            (self.max_memory.is_some(), "max-memory"),
            (self.client_congestion.is_some(), "client-congestion"),
            (self.server_congestion.is_some(), "server-congestion"),
            (self.connect_timeout.is_some(), "connect-timeout"),
            (self.half_closed_timeout.is_some(), "half-closed-timeout"),
        ];
        let misplaced = if self.udp { &of_tcp[..] } else { &of_udp };
        misplaced.iter().find_map(|(is_set, name)| is_set.then_some(*name))
    }
}

fn default_idle_timeout(udp: bool) -> Duration {
    if udp { UDP_IDLE_TIMEOUT } else { TCP_IDLE_TIMEOUT }
}

/// Reads and checks a file. Errors name the line.
fn read(path: &Path) -> Result<File> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("cannot use {}", path.display()))
}

/// A value with a form of its own, as on the command line.
fn text<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(from: D) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

fn texts<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(from: D) -> Result<Vec<T>, D::Error> {
    let texts = Vec::<String>::deserialize(from)?;
    let parse =
        |text: &String| text.parse().map_err(|err| serde::de::Error::custom(format!("{text:?}: {err}")));
    texts.iter().map(parse).collect()
}

fn time<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(from)?;
    parse::duration_or_zero(&text).map(Some).map_err(serde::de::Error::custom)
}

fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
    let text = String::deserialize(from)?;
    parse::bytes(&text).map(Some).map_err(serde::de::Error::custom)
}

fn ports<'de, D: Deserializer<'de>>(from: D) -> Result<Option<RangeInclusive<u16>>, D::Error> {
    let text = String::deserialize(from)?;
    port_range(&text).map(Some).map_err(serde::de::Error::custom)
}

fn stack<'de, D: Deserializer<'de>>(from: D) -> Result<Option<ProxyStack>, D::Error> {
    let text = String::deserialize(from)?;
    clap::ValueEnum::from_str(&text, false).map(Some).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<File, toml::de::Error> {
        toml::from_str(text)
    }

    const LEAST: &str = "listen = [\"0.0.0.0:80\"]\nto = [\"10.0.0.1:80\"]\n";

    #[test]
    fn every_option_can_be_in_the_file() {
        let more = r#"
            balance = "hash"
            proxy-protocol = "v2"
            check-interval = "0"
            stack = "kernel"
            lanes = 2
            interface = ["eth0"]
            source-ports = "50000-60000"
            xdp-generic = true
            rx-usecs = 100
            client-congestion = "bbr"
            server-congestion = "new-reno"
            limit = ["100/10"]
            allow = ["10.0.0.0/8"]
            deny = ["192.0.2.0/24"]
            max-connections = 7
            max-per-source = 3
            max-memory = "512M"
            connect-timeout = "1s"
            idle-timeout = "500ms"
            half-closed-timeout = "2m"
            drain-timeout = "9s"
        "#;
        let file = parsed(&format!("{LEAST}{more}")).unwrap();
        assert_eq!(file.listen, ["0.0.0.0:80".parse().unwrap()]);
        assert_eq!((file.lanes, file.max_connections, file.max_per_source), (Some(2), Some(7), Some(3)));
        assert_eq!(file.max_memory, Some(512 << 20));
        assert_eq!(file.rx_usecs, Some(100));
        assert_eq!(
            (file.client_congestion, file.server_congestion),
            (Some(Algorithm::Bbr), Some(Algorithm::NewReno))
        );
        assert_eq!(file.idle_timeout, Some(Duration::from_millis(500)));
        assert_eq!(file.source_ports, Some(50_000..=60_000));
        assert_eq!((file.stack, file.check_interval), (Some(ProxyStack::Kernel), Some(Duration::ZERO)));
    }

    #[test]
    fn keys_of_the_other_protocol_are_named() {
        let udp = "udp = true\nkey = \"1:8\"\nanswers = 1\nengine = \"mmsg\"\n";
        let file = parsed(&format!("{LEAST}{udp}")).unwrap();
        assert_eq!((file.udp, file.misplaced()), (true, None));
        assert_eq!((file.key, file.engine), ("1:8".parse().ok(), Some(Engine::Mmsg)));
        for (line, what) in [
            ("key = \"1:8\"", "key"),
            ("engine = \"xdp\"", "engine"),
            ("udp = true\nstack = \"kernel\"", "stack"),
            ("udp = true\nrx-usecs = 100", "rx-usecs"),
            ("udp = true\nmax-memory = \"1G\"", "max-memory"),
            ("udp = true\nhalf-closed-timeout = \"1s\"", "half-closed-timeout"),
        ] {
            assert_eq!(parsed(&format!("{LEAST}{line}\n")).unwrap().misplaced(), Some(what));
        }
    }

    #[test]
    fn errors_name_the_line() {
        for (line, what) in [
            ("balance = \"luck\"", "round-robin"),
            ("idle-timeout = \"soon\"", "line 3"),
            ("idle_timeout = \"5s\"", "unknown field"),
            ("max-connections = \"many\"", "invalid type"),
            ("max-memory = \"much\"", "unknown unit"),
            ("allow = [\"10.0.0.0/99\"]", "line 3"),
        ] {
            let text = parsed(&format!("{LEAST}{line}\n")).unwrap_err().to_string();
            assert!(text.contains("line 3") && text.contains(what), "{text}");
        }
        assert!(parsed("listen = [\"0.0.0.0:80\"]\n").unwrap_err().to_string().contains("to"));
    }
}
