//! Enums whose variants have names.

/// Defines an enum whose variants have names in tables, documents and options: `ALL`, `name`,
/// `Display`, and `FromStr`, whose error lists the names.
#[macro_export]
macro_rules! named_enum {
    (
        $(#[$meta:meta])*
        pub enum $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)+ }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// All of them, in order.
            pub const ALL: [Self; [$($text),+].len()] = [$(Self::$variant),+];

            /// The name in tables, documents and options.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl ::std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let found = Self::ALL.into_iter().find(|one| one.name() == text);
                found.ok_or_else(|| format!("expected one of {}", [$($text),+].join(", ")))
            }
        }
    };
}

#[cfg(test)]
#[allow(unreachable_pub, reason = "the macro defines public enums")]
mod tests {
    named_enum! {
        /// Two of them.
        #[derive(Default)]
        pub enum Meal {
            /// In the morning.
            #[default]
            Breakfast = "breakfast",
            /// At noon.
            Lunch = "lunch",
        }
    }

    #[test]
    fn names_are_read_back() {
        for meal in Meal::ALL {
            assert_eq!(meal.to_string().parse(), Ok(meal));
        }
        assert_eq!("dinner".parse::<Meal>(), Err("expected one of breakfast, lunch".into()));
        assert_eq!((Meal::default(), format!("{:>6}", Meal::Lunch)), (Meal::Breakfast, " lunch".into()));
    }
}
