// What every page does: local times, buttons that copy, actions that do not leave the page.
import { localTimes } from 'formats'
import { placeBelow } from 'menus'
import { root } from 'root'

localTimes(document)

const OFFER = 'halfstep-offer'
/** Timer that removes the shown message. */
let timer = 0

/**
 * @param {string|Node} text
 * @param {{label: string, act: () => void, kept?: string}} [offer] a button, for longer; kept: see `keptOffer`
 */
export const toast = (text, offer) => {
  const box = document.querySelector('[data-toast]')
  box.replaceChildren(text)
  box.dataset.offer = offer?.kept ?? ''
  box.hidden = false
  if (offer) {
    const button = Object.assign(document.createElement('button'), { type: 'button', textContent: offer.label })
    button.addEventListener('click', () => {
      box.hidden = true
      offer.act()
    })
    box.append(button)
  }
  const hide = () => {
    if (box.matches(':hover, :focus-within')) timer = setTimeout(hide, 1000)
    else box.hidden = true
  }
  clearTimeout(timer)
  timer = setTimeout(hide, offer ? 15000 : 5000)
}

/** Reload this page and keep the text of the toast. */
export const reload = () => {
  const box = document.querySelector('[data-toast]')
  if (!box.hidden)
    document.cookie = `halfstep-done=${encodeURIComponent(box.firstChild?.textContent ?? '')}; path=/; max-age=30; samesite=strict`
  if (!box.hidden && box.dataset.offer) sessionStorage.setItem(OFFER, box.dataset.offer)
  location.reload()
}

/** Return, once, what the toast offered before this page was reloaded; empty: nothing. */
export const keptOffer = () => {
  const kept = sessionStorage.getItem(OFFER) ?? ''
  sessionStorage.removeItem(OFFER)
  return kept
}

/** Fill in what was typed before. @param {any} form @param {[string, string][]} typed */
const fill = (form, typed) => {
  for (const control of form.elements) {
    const values = typed.filter(([name]) => name === control.name).map(([, value]) => value)
    if (['checkbox', 'radio'].includes(control.type)) control.checked = values.includes(control.value)
    else if (values.length && !['hidden', 'password', 'file'].includes(control.type)) control.value = values[0]
  }
}

// What the form that led here has done, as app/html/flash.py has it.
const done = document.cookie.match(/(?:^|; )halfstep-done=([^;]*)/)
if (done) {
  document.cookie = 'halfstep-done=; path=/; max-age=0; samesite=strict'
  try {
    toast(decodeURIComponent(done[1]))
  } catch {
    /* not one of ours */
  }
}

// A page that answers a POST gets the address of its form: a browser that goes back would ask to repeat the POST.
const { posted } = document.documentElement.dataset
const form = /** @type {any} */ (document.querySelector('form.run-form'))
const address = posted ? root + posted : document.referrer
if (posted === undefined && form && history.state?.typed) fill(form, history.state.typed)
else if (posted !== undefined && new URL(address, location.href).origin === location.origin)
  history.replaceState({ ...history.state, typed: form && [...new FormData(form)] }, '', address)

document.addEventListener('input', ({ target }) => {
  const field = target.closest('.field.wrong')
  field?.querySelector('.error')?.remove()
  field?.classList.remove('wrong')
  if (field) target.removeAttribute('aria-invalid')
})

document.addEventListener('click', async (event) => {
  const button = event.target.closest('[data-copy], [data-copy-text]')
  if (!button) return
  const text = button.dataset.copyText ?? document.querySelector(button.dataset.copy).textContent
  try {
    await navigator.clipboard.writeText(text)
    toast('Copied.')
  } catch {
    toast(`This browser blocks copying. The text is: ${text}`)
  }
})

document.querySelector('[data-switch-theme]')?.addEventListener('click', () => {
  const page = document.documentElement
  const isDark = page.dataset.theme ? page.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches
  page.dataset.theme = isDark ? 'light' : 'dark'
  document.cookie = `halfstep-theme=${page.dataset.theme}; path=/; max-age=31536000; samesite=strict`
  document.dispatchEvent(new Event('themechange'))
})

/** Why not, in words. @param {Response} answer */
const problem = async (answer) => {
  const { detail } = await answer.json()
  return detail
}

document.addEventListener('submit', async (event) => {
  const form = event.target
  if (!form.matches('[data-action]')) return
  event.preventDefault()
  const button = /** @type {Found} */ (event.submitter ?? form.querySelector('button'))
  // A disabled button's own value would not be sent.
  const { csrf_token: _, ...fields } = Object.fromEntries(new FormData(/** @type {any} */ (form), event.submitter))
  form.closest('[popover]')?.hidePopover()
  const hasFocus = document.activeElement === button
  button.disabled = true
  button.blur() // at once: the browser does it when it next draws, and a cell with the focus does not change
  try {
    const token = document.querySelector('meta[name=csrf-token]').content
    const answer = await fetch(`${root}/api/v1${new URL(form.action).pathname.slice(root.length)}`, {
      method: 'POST',
      headers: { 'X-CSRF-Token': token, 'Content-Type': 'application/json' },
      body: JSON.stringify(fields),
    })
    toast(answer.ok ? (button.dataset.done ?? `${button.textContent} requested.`) : await problem(answer))
    if (answer.ok) form.dispatchEvent(new CustomEvent('requested', { detail: fields }))
  } catch {
    toast('The server does not answer. Nothing was changed.')
  } finally {
    button.disabled = false
    const isFree = document.activeElement === document.body
    if (hasFocus && isFree && !button.closest('td')) button.focus({ preventScroll: true })
  }
})

/** Confirm the action of a destructive button. @param {Found} button */
const ask = (button) => {
  const dialog = Object.assign(document.createElement('dialog'), {
    className: 'card',
    innerHTML:
      '<p></p><p class="inline"><button type="button" class="danger"></button> <button type="button" autofocus>Cancel</button></p>',
  })
  const [yes, no] = dialog.querySelectorAll('button')
  dialog.querySelector('p').textContent = button.dataset.confirm
  yes.textContent = button.dataset.yes ?? button.textContent
  yes.addEventListener('click', () => {
    delete button.dataset.confirm
    dialog.close()
    button.click()
  })
  no.addEventListener('click', () => dialog.close())
  dialog.addEventListener('close', () => dialog.remove())
  document.body.append(dialog)
  dialog.showModal()
}
document.addEventListener(
  'click',
  (event) => {
    const button = /** @type {Found} */ (event.target).closest('button[data-confirm]')
    if (!button) return
    event.preventDefault()
    ask(button)
  },
  true,
)

document.addEventListener(
  'toggle',
  (event) => {
    const menu = /** @type {Found} */ (event.target)
    if (event.newState !== 'open' || !menu.matches('[popover][data-below]')) return
    const button = [...document.querySelectorAll(`[popovertarget="${menu.id}"]`)].find((each) => each.offsetWidth)
    if (button) placeBelow(menu, button)
  },
  true,
)

// What opens over the page closes with a choice, with Escape, or with a click elsewhere.
const openOnes = () => document.querySelectorAll('.presets[open]')
document.addEventListener('click', ({ target }) => {
  for (const each of openOnes()) if (!target.closest('.presets > summary')) each.open = false
})
document.addEventListener('keydown', ({ key }) => {
  if (key === 'Escape')
    for (const each of openOnes()) {
      each.open = false
      each.querySelector('summary').focus()
    }
})
