// The page that a read-only link opens: it posts the secret, and takes it out of the address and the history.
const opening = document.querySelector('[data-open-link]')
const sent = location.hash.slice(1)
if (sent) {
  history.replaceState(null, '', location.pathname)
  opening.querySelector('input').value = sent
  opening.querySelector('button').click()
}
