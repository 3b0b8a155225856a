//! The link's own certificate authority: when it is made, who signs, what pods must trust.
//!
//! Pure but for the making of keys: time comes in. A new authority is published long before it signs, so that no pod
//! ever meets a certificate that it cannot check.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256,
};
use serde::{Deserialize, Serialize};

/// Life of an authority.
const AUTHORITY_LIFE: SignedDuration = SignedDuration::from_hours(365 * 24);
/// Life of a server certificate.
const LEAF_LIFE: SignedDuration = SignedDuration::from_hours(90 * 24);
/// A successor is made, and a server certificate renewed, when less than this is left.
const RENEW_BEFORE: SignedDuration = SignedDuration::from_hours(30 * 24);
/// How long a namespace that does not get the bundle is waited for.
const PATIENCE: SignedDuration = SignedDuration::from_hours(7 * 24);
/// How long an authority is published before it signs.
const OVERLAP: SignedDuration = SignedDuration::from_hours(24);
/// Certificates are valid from this long before they are made, for clocks that are late.
const BACKDATE: SignedDuration = SignedDuration::from_hours(1);

/// One authority. Holds a private key: has no `Debug` on purpose.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct CertificateAuthority {
    /// Its certificate, PEM.
    pub certificate: String,
    key: String,
    /// When it expires.
    pub not_after: Timestamp,
    /// Since when it is in the published bundle.
    pub published: Option<Timestamp>,
}

impl CertificateAuthority {
    /// A new authority with a new key.
    pub fn make(now: Timestamp) -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let not_after = now + AUTHORITY_LIFE;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        // The name is unique, so that a client finds the right one of two at once.
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

    /// A server certificate for `hosts`, with a new key.
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

    /// When a server certificate made now would expire: never after its authority.
    fn leaf_end(&self, now: Timestamp) -> Timestamp {
        self.not_after.min(now + LEAF_LIFE)
    }
}

/// A server certificate and its key, DER.
pub struct ServerCertificate {
    /// The certificate.
    pub certificate: Vec<u8>,
    /// The private key, PKCS #8.
    pub key: Vec<u8>,
    issuer: String,
    not_after: Timestamp,
}

impl ServerCertificate {
    /// Whether `signer` should sign a new one now.
    #[must_use]
    pub fn is_due(&self, signer: &CertificateAuthority, now: Timestamp) -> bool {
        let renewable = self.not_after < signer.leaf_end(now);
        self.issuer != signer.certificate || (renewable && self.not_after - RENEW_BEFORE <= now)
    }
}

/// All authorities that pods trust, the oldest first. One; two around a change.
#[derive(Serialize, Deserialize, Clone, Default, PartialEq, Eq)]
#[serde(transparent)]
pub struct TrustedAuthorities(Vec<CertificateAuthority>);

impl TrustedAuthorities {
    /// Drops what has expired and adds a successor when it is time. True when something changed.
    pub fn advance<E>(
        &mut self,
        now: Timestamp,
        make: impl FnOnce(Timestamp) -> Result<CertificateAuthority, E>,
    ) -> Result<bool, E> {
        let before = self.0.len();
        self.0.retain(|authority| authority.not_after > now);
        let mut changed = self.0.len() != before;
        if self.0.last().is_none_or(|newest| newest.not_after - RENEW_BEFORE < now) {
            let mut new = make(now)?;
            // The first one signs at once in any case: nobody trusts another.
            new.published = self.0.is_empty().then_some(now);
            self.0.push(new);
            changed = true;
        }
        Ok(changed)
    }

    /// Notes what is published now. `everywhere`: every namespace has the whole bundle; one that never gets it holds the
    /// others up for [`PATIENCE`] and no longer, since the old authority expires. True when that is new.
    pub fn note_published(&mut self, now: Timestamp, everywhere: bool) -> bool {
        let unpublished = self.0.iter_mut().filter(|authority| authority.published.is_none());
        let due = unpublished.filter(|authority| everywhere || authority.not_after - AUTHORITY_LIFE + PATIENCE <= now);
        due.map(|authority| authority.published = Some(now)).count() > 0
    }

    /// Who signs: the newest that has been published long enough, else the oldest.
    #[must_use]
    pub fn signer(&self, now: Timestamp) -> Option<&CertificateAuthority> {
        let mut newest_first = self.0.iter().rev();
        newest_first
            .find(|authority| authority.published.is_some_and(|since| since + OVERLAP <= now))
            .or_else(|| self.0.first())
    }

    /// The certificates that pods must trust, PEM, the newest first.
    #[must_use]
    pub fn bundle(&self) -> String {
        let newest_first = self.0.iter().rev();
        newest_first.map(|authority| authority.certificate.as_str()).collect()
    }
}

/// Sets the time in which a certificate is valid.
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
    use super::*;

    const HOUR: SignedDuration = SignedDuration::from_hours(1);
    const DAY: SignedDuration = SignedDuration::from_hours(24);

    fn start() -> Timestamp {
        "2030-01-01T00:00:00Z".parse().unwrap()
    }

    /// An authority without real keys: the rules look at times only.
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
    fn a_successor_comes_when_less_than_thirty_days_are_left_and_not_before() {
        let mut authorities = TrustedAuthorities::default();
        authorities.advance(start(), fake).unwrap();
        let thirty_left = start() + AUTHORITY_LIFE - RENEW_BEFORE;
        assert_eq!(authorities.advance(thirty_left, fake), Ok(false));
        assert_eq!(authorities.advance(thirty_left + HOUR, fake), Ok(true));
        assert_eq!(authorities.bundle().lines().count(), 2);
        assert_eq!(authorities.advance(thirty_left + HOUR, fake), Ok(false));
    }

    #[test]
    fn a_successor_signs_a_day_after_its_bundle_went_out_and_not_before() {
        let mut authorities = TrustedAuthorities::default();
        authorities.advance(start(), fake).unwrap();
        let made = start() + AUTHORITY_LIFE - DAY * 20;
        authorities.advance(made, fake).unwrap();
        let signer = |authorities: &TrustedAuthorities, now| authorities.signer(now).unwrap().certificate.clone();
        let (old, new) = (format!("CA {}\n", start()), format!("CA {made}\n"));
        assert_eq!(
            signer(&authorities, made + DAY * 3),
            old,
            "it was made, but never published"
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
    fn a_namespace_that_never_gets_the_bundle_holds_a_successor_up_for_a_week_and_no_longer() {
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

    /// Ten years, looked at every six hours, by a pod whose bundle is always a day old.
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
    fn a_certificate_never_outlives_its_authority_and_is_not_made_anew_in_vain() {
        let authority = CertificateAuthority::make(start()).unwrap();
        let late = authority.not_after - DAY * 10;
        let leaf = authority.sign(&["agentloop-link.x.svc".into()], late).unwrap();
        assert_eq!(leaf.not_after, authority.not_after);
        assert!(!leaf.is_due(&authority, late + DAY));
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
