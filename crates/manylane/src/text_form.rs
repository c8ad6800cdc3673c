//! The text form of options whose values are single words.

/// Implements `Display` and `FromStr` for an enum with a word for each variant. `$option` names the
/// option in errors.
macro_rules! text_form {
    ($option:literal, $type:ident: $($variant:ident = $word:literal),+) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self { $(Self::$variant => $word,)+ })
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::Error;

            fn from_str(text: &str) -> $crate::Result<Self> {
                match text {
                    $($word => Ok(Self::$variant),)+
                    _ => Err($crate::Error::new(
                        $crate::ErrorKind::Config,
                        format!("invalid {} {text:?}: expected one of {}", $option, [$($word),+].join(", ")),
                    )),
                }
            }
        }
    };
}

pub(crate) use text_form;
