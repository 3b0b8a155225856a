//! The certificate authority of the link: when it is created and rotated, which one signs, and what pods must trust.
//!
//! Pure except for the generation of keys: the time is passed in. A new authority is published long before it signs, so
//! that no pod meets a certificate that it cannot verify.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256,
};
use serde::{Deserialize, Serialize};

/// Validity of an authority.
const AUTHORITY_LIFE: SignedDuration = SignedDuration::from_hours(365 * 24);
/// Validity of a [`ServerCertificate`].
const LEAF_LIFE: SignedDuration = SignedDuration::from_hours(90 * 24);
/// A successor is created, or a [`ServerCertificate`] renewed, when less than this is left.
const RENEW_BEFORE: SignedDuration = SignedDuration::from_hours(30 * 24);
/// How long a namespace that does not receive the bundle can delay a successor.
const PUBLICATION_TIMEOUT: SignedDuration = SignedDuration::from_hours(7 * 24);
/// How long an authority is published before it signs.
const OVERLAP: SignedDuration = SignedDuration::from_hours(24);
/// Certificates are valid from this long before they are made: a leader whose clock is ahead makes some that pods
/// accept, and that are still good once its clock is right.
const BACKDATE: SignedDuration = AUTHORITY_LIFE;

/// One authority. Contains a private key and therefore deliberately has no `Debug`.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct CertificateAuthority {
    /// The certificate, PEM.
    pub certificate: String,
    key: String,
    /// Expiry of the certificate.
    pub not_after: Timestamp,
    /// Since when the published bundle contains it; `None`: not yet.
    pub published: Option<Timestamp>,
}

impl CertificateAuthority {
    /// Creates an authority with a new key.
    pub fn make(now: Timestamp) -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let not_after = now + AUTHORITY_LIFE;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        // A unique name lets a client select the right one of two authorities at once.
        params
            .distinguished_name
            .push(DnType::CommonName, format!("agentloop link CA {now}"));
        validity(&mut params, now, not_after);
        Ok(Self {
            certificate: params.self_signed(&key)?.pem(),
            key: key.serialize_pem(),
            not_after,
            published: None,
        })
    }

    /// Signs a [`ServerCertificate`] for `hosts`, with a new key.
    pub fn sign(&self, hosts: &[String], now: Timestamp) -> Result<ServerCertificate, rcgen::Error> {
        let issuer = Issuer::from_ca_cert_pem(&self.certificate, KeyPair::from_pem(&self.key)?)?;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let not_after = self.leaf_end(now);
        let mut params = CertificateParams::new(hosts)?;
        params.distinguished_name.push(DnType::CommonName, "agentloop link");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        validity(&mut params, now, not_after);
        Ok(ServerCertificate {
            certificate: params.signed_by(&key, &issuer)?.der().to_vec(),
            key: key.serialize_der(),
            issuer: self.certificate.clone(),
            not_after,
        })
    }

    /// Whether it can be checked now. An authority that is not valid yet was made by a clock that was ahead.
    fn is_valid(&self, now: Timestamp) -> bool {
        // The times are those of a Secret, in which anything may be.
        let from = self.not_after.checked_sub(AUTHORITY_LIFE + BACKDATE);
        from.is_ok_and(|from| from <= now) && now < self.not_after
    }

    /// The expiry of a [`ServerCertificate`] created now; never later than that of its authority.
    fn leaf_end(&self, now: Timestamp) -> Timestamp {
        self.not_after.min(now + LEAF_LIFE)
    }
}

/// A server certificate and its private key, DER.
pub struct ServerCertificate {
    pub certificate: Vec<u8>,
    /// The private key, PKCS #8.
    pub key: Vec<u8>,
    issuer: String,
    not_after: Timestamp,
}

impl ServerCertificate {
    /// Whether `signer` should sign a replacement now. False if the replacement would not be valid any longer.
    #[must_use]
    pub fn is_due(&self, signer: &CertificateAuthority, now: Timestamp) -> bool {
        let renewable = self.not_after < signer.leaf_end(now);
        let is_old = now.checked_add(RENEW_BEFORE).is_ok_and(|end| self.not_after <= end);
        self.issuer != signer.certificate || (renewable && is_old)
    }
}

/// All trusted authorities, oldest first: one, or two during a rotation.
#[derive(Serialize, Deserialize, Clone, Default, PartialEq, Eq)]
#[serde(transparent)]
pub struct TrustedAuthorities(Vec<CertificateAuthority>);

impl TrustedAuthorities {
    /// Drops what is not valid now and adds a successor when it is time. True when something changed.
    pub fn advance<E>(
        &mut self,
        now: Timestamp,
        make: impl FnOnce(Timestamp) -> Result<CertificateAuthority, E>,
    ) -> Result<bool, E> {
        let before = self.0.len();
        self.0.retain(|authority| authority.is_valid(now));
        let mut changed = self.0.len() != before;
        let ends_soon =
            |newest: &CertificateAuthority| now.checked_add(RENEW_BEFORE).is_ok_and(|end| newest.not_after < end);
        if self.0.last().is_none_or(ends_soon) {
            let mut new = make(now)?;
            // The first authority signs at once: no pod trusts another one.
            new.published = self.0.is_empty().then_some(now);
            self.0.push(new);
            changed = true;
        }
        Ok(changed)
    }

    /// Records the publication. `everywhere`: every namespace has the whole bundle. A namespace that never receives it
    /// delays the others for at most [`PUBLICATION_TIMEOUT`], since the old authority expires. Returns whether anything changed.
    pub fn note_published(&mut self, now: Timestamp, everywhere: bool) -> bool {
        let unpublished = self.0.iter_mut().filter(|authority| authority.published.is_none());
        // An authority was created AUTHORITY_LIFE before it expires.
        let end_of_late = now.checked_add(AUTHORITY_LIFE - PUBLICATION_TIMEOUT);
        let is_late =
            |authority: &CertificateAuthority| end_of_late.as_ref().is_ok_and(|end| authority.not_after <= *end);
        let due = unpublished.filter(|authority| everywhere || is_late(authority));
        due.map(|authority| authority.published = Some(now)).count() > 0
    }

    /// The authority that signs: the newest one published for at least 24 h, otherwise the oldest.
    #[must_use]
    pub fn signer(&self, now: Timestamp) -> Option<&CertificateAuthority> {
        let mut newest_first = self.0.iter().rev();
        let latest = now.checked_sub(OVERLAP).ok();
        newest_first
            .find(|authority| {
                authority
                    .published
                    .is_some_and(|since| latest.is_some_and(|latest| since <= latest))
            })
            .or_else(|| self.0.first())
    }

    /// The certificates that pods must trust, PEM, newest first.
    #[must_use]
    pub fn bundle(&self) -> String {
        let newest_first = self.0.iter().rev();
        newest_first.map(|authority| authority.certificate.as_str()).collect()
    }
}

/// Sets the validity period of a certificate.
fn validity(params: &mut CertificateParams, from: Timestamp, until: Timestamp) {
    let date = |at: Timestamp| {
        let since_epoch = Duration::from_secs(at.as_second().try_into().unwrap_or_default());
        rcgen::date_time_ymd(1970, 1, 1) + since_epoch
    };
    params.not_before = date(from - BACKDATE);
    params.not_after = date(until);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, UnixTime};

    use super::*;

    const HOUR: SignedDuration = SignedDuration::from_hours(1);
    const DAY: SignedDuration = SignedDuration::from_hours(24);

    fn start() -> Timestamp {
        "2030-01-01T00:00:00Z".parse().unwrap()
    }

    /// An authority without real keys: the rules depend only on times.
    #[allow(clippy::unnecessary_wraps)]
    fn fake(now: Timestamp) -> Result<CertificateAuthority, ()> {
        Ok(CertificateAuthority {
            certificate: format!("CA {now}\n"),
            key: String::new(),
            not_after: now + AUTHORITY_LIFE,
            published: None,
        })
    }

    #[test]
    fn the_first_authority_signs_at_once() {
        let mut authorities = TrustedAuthorities::default();
        assert_eq!(authorities.advance(start(), fake), Ok(true));
        assert_eq!(authorities.signer(start()).unwrap().certificate, authorities.bundle());
        assert_eq!(authorities.advance(start(), fake), Ok(false));
        assert!(!authorities.note_published(start(), true));
    }

    #[test]
    fn a_successor_is_created_when_less_than_thirty_days_are_left_and_not_before() {
        let mut authorities = TrustedAuthorities::default();
        authorities.advance(start(), fake).unwrap();
        let thirty_left = start() + AUTHORITY_LIFE - RENEW_BEFORE;
        assert_eq!(authorities.advance(thirty_left, fake), Ok(false));
        assert_eq!(authorities.advance(thirty_left + HOUR, fake), Ok(true));
        assert_eq!(authorities.bundle().lines().count(), 2);
        assert_eq!(authorities.advance(thirty_left + HOUR, fake), Ok(false));
    }

    #[test]
    fn a_successor_signs_a_day_after_its_bundle_was_published_and_not_before() {
        let mut authorities = TrustedAuthorities::default();
        authorities.advance(start(), fake).unwrap();
        let made = start() + AUTHORITY_LIFE - DAY * 20;
        authorities.advance(made, fake).unwrap();
        let signer = |authorities: &TrustedAuthorities, now| authorities.signer(now).unwrap().certificate.clone();
        let (old, new) = (format!("CA {}\n", start()), format!("CA {made}\n"));
        assert_eq!(
            signer(&authorities, made + DAY * 3),
            old,
            "created, but never published"
        );
        let published = made + DAY * 3;
        assert!(
            !authorities.note_published(published - HOUR, false),
            "a namespace lacks it"
        );
        assert!(authorities.note_published(published, true));
        assert_eq!(signer(&authorities, published + DAY - HOUR), old);
        assert_eq!(signer(&authorities, published + DAY), new);
    }

    #[test]
    fn a_namespace_without_the_bundle_delays_a_successor_for_at_most_a_week() {
        let mut authorities = TrustedAuthorities::default();
        authorities.advance(start(), fake).unwrap();
        let made = start() + AUTHORITY_LIFE - DAY * 20;
        authorities.advance(made, fake).unwrap();
        assert!(!authorities.note_published(made + DAY * 7 - HOUR, false));
        assert!(authorities.note_published(made + DAY * 7, false));
    }

    #[test]
    fn an_expired_authority_leaves_the_bundle_and_an_empty_one_starts_again() {
        let mut authorities = TrustedAuthorities::default();
        authorities.advance(start(), fake).unwrap();
        let expiry = start() + AUTHORITY_LIFE;
        authorities.advance(expiry - HOUR, fake).unwrap();
        assert_eq!(authorities.bundle().lines().count(), 2);
        assert_eq!(authorities.advance(expiry, fake), Ok(true));
        assert_eq!(authorities.bundle(), format!("CA {}\n", expiry - HOUR));
        let much_later = expiry + AUTHORITY_LIFE * 3;
        assert_eq!(authorities.advance(much_later, fake), Ok(true));
        assert_eq!(authorities.signer(much_later).unwrap().published, Some(much_later));
    }

    #[test]
    fn an_authority_with_times_that_no_leader_wrote_is_not_valid_and_its_successor_signs() {
        for not_after in [
            Timestamp::MIN,
            Timestamp::MAX,
            Timestamp::MIN + HOUR,
            Timestamp::MAX - HOUR,
        ] {
            for published in [None, Some(Timestamp::MIN), Some(Timestamp::MAX)] {
                let strange = CertificateAuthority {
                    certificate: "strange\n".into(),
                    key: String::new(),
                    not_after,
                    published,
                };
                let mut authorities = TrustedAuthorities(vec![strange]);
                authorities.note_published(start(), false);
                assert!(authorities.signer(start()).is_some());
                assert_eq!(authorities.advance(start(), fake), Ok(true));
                let signer = authorities.signer(start()).unwrap();
                assert_eq!(
                    (signer.certificate.clone(), authorities.bundle()),
                    (format!("CA {}\n", start()), format!("CA {}\n", start()))
                );
            }
        }
        // Valid, and published at a time that is out of range.
        let mut authorities = TrustedAuthorities::default();
        authorities.advance(start(), fake).unwrap();
        authorities.0[0].published = Some(Timestamp::MAX);
        assert!(authorities.signer(start()).is_some());
        let leaf = ServerCertificate {
            certificate: vec![],
            key: vec![],
            issuer: authorities.bundle(),
            not_after: Timestamp::MIN,
        };
        assert!(leaf.is_due(&authorities.0[0], start()));
    }

    /// Ten years, checked every six hours, with a pod whose bundle is always a day old.
    #[test]
    fn over_ten_years_a_pod_that_learns_of_bundles_a_day_late_always_trusts_the_signer() {
        let mut authorities = TrustedAuthorities::default();
        let (mut bundles, mut signers) = (Vec::new(), Vec::new());
        let mut now = start();
        while now < start() + AUTHORITY_LIFE * 10 {
            authorities.advance(now, fake).unwrap();
            authorities.note_published(now, true);
            let signer = authorities.signer(now).unwrap();
            assert!(signer.not_after > now, "{now}: the signer has expired");
            bundles.push(authorities.bundle());
            signers.push(signer.certificate.clone());
            let seen_by_pod = &bundles[bundles.len().saturating_sub(5)];
            assert!(seen_by_pod.contains(&signer.certificate), "{now}: unknown signer");
            assert!(authorities.0.len() <= 2);
            now += HOUR * 6;
        }
        signers.dedup();
        assert_eq!(signers.len(), 11, "each year one new signer");
    }

    #[test]
    fn a_certificate_is_renewed_in_its_last_thirty_days_or_when_the_signer_changes() {
        let authority = CertificateAuthority::make(start()).unwrap();
        let leaf = authority.sign(&["agentloop-link.x.svc".into()], start()).unwrap();
        let thirty_left = start() + LEAF_LIFE - RENEW_BEFORE;
        assert!(!leaf.is_due(&authority, thirty_left - HOUR));
        assert!(leaf.is_due(&authority, thirty_left));
        assert!(leaf.is_due(&CertificateAuthority::make(start()).unwrap(), start()));
    }

    #[test]
    fn a_certificate_never_outlives_its_authority_and_is_not_renewed_in_vain() {
        let authority = CertificateAuthority::make(start()).unwrap();
        let late = authority.not_after - DAY * 10;
        let leaf = authority.sign(&["agentloop-link.x.svc".into()], late).unwrap();
        assert_eq!(leaf.not_after, authority.not_after);
        assert!(!leaf.is_due(&authority, late + DAY));
    }

    const HOST: &str = "agentloop-link.x.svc";

    /// Whether a pod whose clock says `now` accepts the certificate.
    fn accepts(bundle: &str, leaf: &ServerCertificate, now: Timestamp) -> bool {
        let mut roots = rustls::RootCertStore::empty();
        for pem in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
            roots.add(pem.unwrap()).unwrap();
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider);
        let now = UnixTime::since_unix_epoch(Duration::from_secs(now.as_second().try_into().unwrap()));
        let (host, leaf) = (HOST.try_into().unwrap(), CertificateDer::from(leaf.certificate.clone()));
        let verifier = verifier.build().unwrap();
        verifier.verify_server_cert(&leaf, &[], &host, &[], now).is_ok()
    }

    /// One look of a leader whose clock says `now`: the bundle, and the certificate that it serves with from then on.
    fn step(authorities: &mut TrustedAuthorities, now: Timestamp) -> (String, ServerCertificate) {
        authorities.advance(now, CertificateAuthority::make).unwrap();
        authorities.note_published(now, true);
        let leaf = authorities.signer(now).unwrap().sign(&[HOST.into()], now).unwrap();
        (authorities.bundle(), leaf)
    }

    #[test]
    fn a_leader_whose_clock_is_up_to_a_year_ahead_is_accepted_then_and_after_the_clock_is_right() {
        for ahead in [SignedDuration::ZERO, HOUR * 2, DAY * 364, AUTHORITY_LIFE] {
            let mut authorities = TrustedAuthorities::default();
            step(&mut authorities, start());
            let now = start() + DAY;
            let (bundle, leaf) = step(&mut authorities, now + ahead);
            assert!(accepts(&bundle, &leaf, now), "ahead by {ahead}");
            let (after, leaf) = step(&mut authorities, now + HOUR);
            assert_eq!(after, bundle, "no pod needs another one");
            assert!(accepts(&after, &leaf, now + HOUR), "ahead by {ahead}");
        }
    }

    #[test]
    fn an_authority_made_by_a_clock_that_was_further_ahead_is_replaced_once_the_clock_is_right() {
        let mut authorities = TrustedAuthorities::default();
        step(&mut authorities, start());
        let (bundle, leaf) = step(&mut authorities, start() + AUTHORITY_LIFE + BACKDATE + HOUR);
        assert!(!accepts(&bundle, &leaf, start()));
        let (bundle, leaf) = step(&mut authorities, start());
        assert_eq!(authorities.0.len(), 1);
        assert!(accepts(&bundle, &leaf, start()));
    }

    #[test]
    fn a_certificate_made_by_a_clock_that_was_behind_is_renewed_once_the_clock_is_right() {
        let mut authorities = TrustedAuthorities::default();
        step(&mut authorities, start());
        for (behind, is_accepted) in [(LEAF_LIFE - DAY, true), (LEAF_LIFE + DAY, false), (DAY * 300, false)] {
            let (bundle, leaf) = step(&mut authorities, start() - behind);
            assert_eq!(accepts(&bundle, &leaf, start()), is_accepted, "behind by {behind}");
            assert!(leaf.is_due(authorities.signer(start()).unwrap(), start()));
            let (bundle, leaf) = step(&mut authorities, start());
            assert!(accepts(&bundle, &leaf, start()), "behind by {behind}");
        }
    }

    #[test]
    fn authorities_survive_their_stored_form() {
        let mut authorities = TrustedAuthorities::default();
        authorities.advance(start(), CertificateAuthority::make).unwrap();
        let stored = serde_json::to_vec(&authorities).unwrap();
        let read: TrustedAuthorities = serde_json::from_slice(&stored).unwrap();
        assert!(read == authorities);
        read.signer(start()).unwrap().sign(&["x.svc".into()], start()).unwrap();
    }
}
