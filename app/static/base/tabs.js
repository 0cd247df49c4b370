// One part of a page at a time, behind tabs. Without this script all parts are there, one below the other.

/** How long the target of an address is kept in its place. */
const HOLD_MS = 5000

/**
 * @param {HTMLElement} article
 * @param {(name: string) => void} onSelect is called with each tab that is shown, including the first
 */
export const createTabs = (article, onSelect) => {
  const list = article.querySelector('[data-tabs]')
  const tabs = [...list.querySelectorAll('[data-tab]')]
  /** @param {Found} tab */
  const panelOf = (tab) => article.querySelector(`[data-panel="${tab.dataset.tab}"]`)
  const usual = tabs.find((tab) => panelOf(tab).dataset.shown !== undefined) ?? tabs[0]
  /** @type {Found|null} */
  let selected = null

  list.setAttribute('role', 'tablist')
  for (const tab of tabs) {
    const panel = panelOf(tab)
    tab.setAttribute('role', 'tab')
    tab.setAttribute('aria-controls', panel.id)
    panel.setAttribute('role', 'tabpanel')
    panel.setAttribute('aria-labelledby', tab.id)
  }

  /** Return the scroll position at which a panel's top is right below the tabs. */
  const top = () => list.parentElement.getBoundingClientRect().top + scrollY - parseFloat(getComputedStyle(list).top)

  /** @param {Found} tab */
  const select = (tab) => {
    if (tab === selected) return
    selected = tab
    for (const each of tabs) {
      each.setAttribute('aria-selected', String(each === tab))
      each.tabIndex = each === tab ? 0 : -1
      panelOf(each).toggleAttribute('data-shown', each === tab)
    }
    // Where another part was scrolled to is nothing to this one, and the tabs stay where they are.
    if (scrollY > top()) scrollTo({ top: top(), behavior: 'instant' })
    const { left, right } = list.getBoundingClientRect()
    const box = tab.getBoundingClientRect()
    if (box.left < left || box.right > right) list.scrollLeft += (box.left + box.right - left - right) / 2
    onSelect(tab.dataset.tab)
  }
  /** @param {Found} tab */
  const choose = (tab) => {
    if (location.hash) history.replaceState(null, '', location.pathname + location.search)
    select(tab)
  }
  let held = new ResizeObserver(() => {})
  /** Keep a target at the top while what is above it still grows, until the user acts. @param {Element} target */
  const hold = (target) => {
    held.disconnect()
    const own = new ResizeObserver(() => target.scrollIntoView())
    own.observe(article)
    held = own
    for (const name of ['wheel', 'touchstart', 'pointerdown', 'keydown'])
      addEventListener(name, () => own.disconnect(), { once: true, passive: true, capture: true })
    setTimeout(() => own.disconnect(), HOLD_MS)
  }
  /** Open the tab that contains the address's target, if one does. */
  const followHash = () => {
    const target = document.getElementById(location.hash.slice(1))
    const wanted = tabs.find((each) => panelOf(each).contains(target))
    const tab = wanted?.hidden ? tabs.find(({ dataset }) => dataset.tab === 'files') : wanted // without media
    if (!wanted || !tab || !target) return
    select(tab)
    if (target === panelOf(wanted)) return
    target.scrollIntoView()
    hold(target)
  }

  list.addEventListener('click', (event) => {
    const tab = event.target.closest('[data-tab]')
    if (!tab || event.ctrlKey || event.metaKey || event.shiftKey) return
    event.preventDefault()
    choose(tab)
  })
  list.addEventListener('keydown', (event) => {
    const seen = tabs.filter(({ hidden }) => !hidden)
    const [at, last] = [seen.findIndex((tab) => tab === selected), seen.length - 1]
    const next = {
      ArrowRight: at === last ? 0 : at + 1,
      ArrowLeft: at === 0 ? last : at - 1,
      Home: 0,
      End: last,
      ' ': at,
    }[event.key]
    if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return
    event.preventDefault()
    choose(seen[next])
    seen[next].focus({ preventScroll: true })
  })
  addEventListener('hashchange', followHash)
  // A link to where the address points already changes nothing there.
  article.addEventListener('click', ({ target }) => {
    if (target.closest('a[href^="#"]')?.hash === location.hash) followHash()
  })

  followHash()
  if (!selected) select(usual)
}
