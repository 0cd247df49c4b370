// The page of a check: the finding of the line that has the focus. keys.js moves the focus by j and k.
const links = [...document.querySelectorAll('[data-marked] th a')]
const findings = [...document.querySelectorAll('.finding')]
const pane = document.querySelector('.pane')
const [previous, next] = document.querySelectorAll('[data-step]')

/** Show the finding of a line. @param {Found} link */
const show = (link) => {
  for (const each of links) each.removeAttribute('aria-current')
  link.setAttribute('aria-current', 'true')
  for (const each of findings) each.toggleAttribute('data-shown', `#${each.dataset.for}` === link.hash)
  previous.disabled = link === links[0]
  next.disabled = link === links.at(-1)
}

const current = () => links.findIndex((link) => link.hasAttribute('aria-current'))
const named = () => links.find(({ hash }) => hash === location.hash)

for (const link of links) {
  link.addEventListener('focus', () => show(link))
  link.closest('tr').addEventListener('click', (event) => {
    event.preventDefault()
    link.focus({ preventScroll: true })
    history.replaceState(history.state, '', link.hash)
    if (getComputedStyle(pane).position === 'static') pane.scrollIntoView()
  })
}
for (const button of document.querySelectorAll('[data-step]')) {
  button.addEventListener('click', () => {
    const link = links[current() + Number(button.dataset.step)]
    show(link)
    link.scrollIntoView({ block: 'center' })
  })
}
for (const button of document.querySelectorAll('.unfold button')) {
  button.addEventListener('click', () => {
    const block = button.closest('tbody')
    block.nextElementSibling?.toggleAttribute('data-shown', true)
    block.remove()
  })
}
for (const choice of document.querySelectorAll('[name=lines]')) {
  choice.addEventListener('change', () =>
    document.querySelector('.check-split').classList.toggle('marked-only', choice.value === 'marked'),
  )
}
addEventListener('hashchange', () => named()?.focus())
if (links.length) show(named() ?? links[0])
