// Choosing columns and their order: the form's one field is made of what is ticked, top to bottom.
import { fetched } from 'http'
import { root } from 'root'
import { ADDED } from 'column_room'

const form = document.querySelector('[data-columns-form]')
const choices = form?.querySelector('[data-choices]')
const own = form?.querySelector('[data-own]')

/** Name the ticked columns in the address; the name comes first in any case. */
const write = () => {
  for (const choice of choices.children) choice.classList.toggle('chosen', choice.querySelector('input').checked)
  const ticked = [...choices.querySelectorAll(':checked')].map(({ value }) => value)
  form.elements.columns.value = ['name', ...ticked].join(',')
}

/** Move a column one place; the button keeps the focus. @param {HTMLElement} choice */
const move = (choice, step, button) => {
  const other = step < 0 ? choice.previousElementSibling : choice.nextElementSibling
  other?.[step < 0 ? 'before' : 'after'](choice)
  button.focus()
  write()
}

/** Why there is no such setting or metric, with the nearest name; empty if there is. @param {string} name */
const mistakeIn = async (name) => {
  const answer = await fetched(`${root}/runs?${new URLSearchParams({ columns: name })}`)
  const page = new DOMParser().parseFromString(await answer.text(), 'text/html')
  return page.querySelector('#filter-status .warn')?.textContent ?? ''
}

/** Resolves to whether the last name exists, once it is added. */
let added = Promise.resolve(true)
const add = () => {
  const name = own.value.trim().replaceAll(',', '')
  own.value = ''
  if (name) added = added.then(() => addColumn(name))
}

/** Add a setting or a metric. @param {string} name */
const addColumn = async (name) => {
  const known = choices.querySelector(`[data-choice="${CSS.escape(name)}"]`)
  const mistake = known ? '' : await mistakeIn(name)
  form.querySelector('[data-own-error]').textContent = mistake
  if (mistake) own.value ||= name
  if (mistake) return false
  const choice = known ?? choices.firstElementChild.cloneNode(true)
  if (!known) {
    choice.dataset.choice = name
    const [label, left, right] = [choice.querySelector('label'), ...choice.querySelectorAll('[data-move]')]
    label.title = name
    label.lastChild.textContent = ` ${name}`
    left.ariaLabel = `${name} further left`
    right.ariaLabel = `${name} further right`
  }
  const box = choice.querySelector('input')
  Object.assign(box, { checked: true, value: name })
  choice.removeAttribute('data-no-room')
  const before = [...choices.children].filter((each) => each !== choice && each.querySelector(':checked'))
  if (before.length) before.at(-1).after(choice)
  else choices.prepend(choice)
  sessionStorage.setItem(ADDED, name)
  choice.scrollIntoView({ block: 'nearest' })
  write()
  return true
}

/** Settings and metrics to choose from. */
const offer = async () => {
  const answer = await fetched(`${root}/api/v1/runs/autocomplete`)
  const { metrics, settings } = await answer.json()
  form.querySelector('datalist').replaceChildren(...[...metrics, ...settings].map((name) => new Option(name)))
}

const group = document.querySelector('#group-by')
/** Settings to group by. */
const offerSettings = async () => {
  const { settings } = await (await fetched(`${root}/api/v1/runs/autocomplete`)).json()
  document.querySelector('#group-names').append(...settings.map((name) => new Option(name)))
}
group?.addEventListener('focus', offerSettings, { once: true })

if (form) {
  form.addEventListener('change', (event) => {
    if (event.target.matches('[type=checkbox]')) write()
  })
  form.addEventListener('click', (event) => {
    const button = event.target.closest('[data-move]')
    if (button) move(button.closest('li'), Number(button.dataset.move), button)
    if (event.target.closest('[data-add]')) add()
  })
  own.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter') return
    event.preventDefault()
    add()
  })
  form.addEventListener('submit', async (event) => {
    event.preventDefault()
    add()
    write()
    if (await added) /** @type {any} */ (form).submit()
    else added = Promise.resolve(true)
  })
  own.addEventListener('focus', offer, { once: true })
}
