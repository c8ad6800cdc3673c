//! The maps of one device's XDP program with the filters of its sockets.

use std::collections::BTreeMap;

use aya::maps::lpm_trie::Key;
use aya::maps::{Array, LpmTrie, Map, MapData, PerCpuArray, PerCpuValues};
use aya::util::nr_cpus;
use manylane_bpf::abi;

use crate::bpf_load::bpf_error;
use crate::counters::FilterDrops;
use crate::error::{Error, Result};
use crate::filter::{Filter, Prefix, Rule};

/// A socket's index on a device.
pub(crate) type SocketIndex = u32;

/// The maps of one device's program.
pub(crate) struct FilterMaps {
    name: String,
    filters: Array<MapData, abi::FilterWords>,
    rules: LpmTrie<MapData, abi::RuleKey, u32>,
    drops: PerCpuArray<MapData, abi::FilterDropWords>,
    /// The installed rules, by number of the socket.
    installed: Vec<BTreeMap<Prefix, Rule>>,
}

impl FilterMaps {
    /// `map` takes a map of the program by name. `wrong` makes the error if it cannot be used.
    pub(crate) fn new(
        name: &str,
        mut map: impl FnMut(&str) -> Result<Map>,
        wrong: impl Fn(aya::maps::MapError) -> Error,
    ) -> Result<Self> {
        Ok(Self {
            name: name.into(),
            filters: Array::try_from(map("ml_filters")?).map_err(&wrong)?,
            rules: LpmTrie::try_from(map("ml_rules")?).map_err(&wrong)?,
            drops: PerCpuArray::try_from(map("ml_filter_drops")?).map_err(&wrong)?,
            installed: vec![BTreeMap::new(); abi::SOCKETS_MAX as usize],
        })
    }

    /// Installs the filter `guard` of `socket`. Prefixes are added before the program uses them,
    /// and removed after.
    pub(super) fn apply(&mut self, socket: SocketIndex, guard: &Filter, generation: u32) -> Result<()> {
        let wrong = |name: &str, err| bpf_error(name, "cannot write a socket's filter to the eBPF map", err);
        let there = &mut self.installed[socket as usize];
        let wanted: BTreeMap<Prefix, Rule> = guard.rules().collect();
        for (prefix, rule) in &wanted {
            if there.get(prefix) == Some(rule) {
                continue;
            }
            let value = match rule {
                Rule::Allow => abi::ALLOW,
                Rule::Deny => abi::DENY,
            };
            let (bits, key) = prefix.to_abi(socket);
            self.rules.insert(&Key::new(bits, key), value, 0).map_err(|err| wrong(&self.name, err))?;
            there.insert(*prefix, *rule);
        }
        let mut limit = [abi::Limit::default(); abi::LIMITS_MAX];
        for (place, limit) in limit.iter_mut().zip(guard.limits()) {
            *place = limit.to_abi();
        }
        let words = abi::FilterEntry { rules: u32::from(!wanted.is_empty()), generation, limit }.to_words();
        self.filters.set(socket, words, 0).map_err(|err| wrong(&self.name, err))?;
        there.retain(|prefix, _| {
            let stays = wanted.contains_key(prefix);
            if !stays {
                let (bits, key) = prefix.to_abi(socket);
                // It exists: nothing else removes it.
                _ = self.rules.remove(&Key::new(bits, key));
            }
            stays
        });
        Ok(())
    }

    /// Clears a number that is not in use: it accepts everything, and its drops are zero.
    pub(super) fn clear(&mut self, socket: SocketIndex) {
        // Cannot fail: neither step needs memory.
        _ = self.apply(socket, &Filter::default(), 0);
        if let Ok(zeroes) = nr_cpus().map(|cpus| vec![[0; 2]; cpus])
            && let Ok(zeroes) = PerCpuValues::try_from(zeroes)
        {
            _ = self.drops.set(socket, zeroes, 0);
        }
    }

    pub(super) fn drops(&self, socket: SocketIndex) -> FilterDrops {
        // Every index exists in a map of this size, so a read fails only without memory.
        let Ok(cpus) = self.drops.get(&socket, 0) else { return FilterDrops::default() };
        let mut sum = FilterDrops::default();
        for [denied, limited] in cpus.iter() {
            sum += FilterDrops { denied: *denied, limited: *limited };
        }
        sum
    }
}
